"""API keys: how one is made, and what the settings store of it.

A key is a random secret. `FLOTILLA_API_KEYS` holds one line per key: its name, its scope and the SHA-256 of the secret.
The secret is random, so its hash needs no salt.
"""

import hashlib
import re
import secrets
from typing import Literal

Scope = Literal["read", "operate", "admin"]
KEY = re.compile(r"(?P<name>[A-Za-z0-9_.-]{1,64}):(?P<scope>read|operate|admin):(?P<digest>[0-9a-f]{64})")


def make_key(name: str, scope: Scope) -> tuple[str, str]:
    """Return a new key, and its line for the settings."""
    key = f"flotilla_{secrets.token_urlsafe(32)}"
    return key, f"{name}:{scope}:{digest(key)}"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
