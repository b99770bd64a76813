"""The caller of a request: who it is, and what it may do. A scope includes those before it:

read       read everything
operate    change what runs: trigger, cancel, retry, pause; also a service's own routes
admin      override what protects data: release a lock that an instance holds
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias, get_args

from starlette.requests import Request

from app.fleet.api_keys import Scope

RANK = {scope: rank for rank, scope in enumerate(get_args(Scope))}
MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class Caller:
    """Who sends a request: the name of its API key, or what the service's sign-in returns. None: there are no keys."""

    name: str | None
    scope: Scope

    def __post_init__(self) -> None:
        if self.scope not in RANK:
            raise ValueError(f"the scope of a caller is one of {', '.join(RANK)}, and not {self.scope!r}")
        if self.name is not None and not (0 < len(self.name) <= MAX_NAME_LENGTH and self.name.isprintable()):
            raise ValueError(f"the name of a caller has 1 to {MAX_NAME_LENGTH} printable characters")

    def may(self, scope: Scope) -> bool:
        return RANK[self.scope] >= RANK[scope]


# Without API keys, which only development allows, every caller may do everything.
ANYONE = Caller(None, "admin")

# Returns who sends a request, or raises an `HTTPException` with 401 or 403.
SignIn: TypeAlias = Callable[[Request], Awaitable[Caller]]
