"""Refused API keys: they are counted, and an address that keeps sending unknown ones is answered with 429.

An address may send `MAX_UNKNOWN_KEYS` unknown keys within `WINDOW` seconds. Further unknown keys are answered with 429
until the window ends. A valid key is never refused, whatever its address has sent before: it is compared first.

The table is bounded: at most `MAX_ADDRESSES` addresses have their own entry, and all others share one. An IPv6 address
counts as its network of 64 bits, because one client has all of it. Behind a load balancer that is not in
`FLOTILLA_TRUSTED_PROXIES`, or that does not pass on the address of the client, all clients share its entry.

The table belongs to this instance: with N instances, an address may send N times as many unknown keys.
"""

import ipaddress
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

MAX_UNKNOWN_KEYS = 10
WINDOW = 60.0
MAX_ADDRESSES = 1000
OTHERS = "(others)"

Reason = Literal["missing", "unknown", "scope"]


@dataclass
class Window:
    until: float
    refused: int = 0


class RefusedKeys:
    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[Reason] = Counter()
        self._now = now
        # In the order in which the windows end.
        self._windows: dict[str, Window] = {}

    def count(self, reason: Reason) -> None:
        self.counts[reason] += 1

    def unknown_key(self, address: str) -> float:
        """Count an unknown key; return for how many seconds its address must wait, 0 if it need not."""
        self.count("unknown")
        now = self._now()
        self._remove_ended(now)
        name = network_of(address)
        if name not in self._windows and len(self._windows) >= MAX_ADDRESSES:
            name = OTHERS
        window = self._windows.setdefault(name, Window(now + WINDOW))
        window.refused += 1
        return window.until - now if window.refused > MAX_UNKNOWN_KEYS else 0.0

    def __len__(self) -> int:
        return len(self._windows)

    def _remove_ended(self, now: float) -> None:
        while self._windows:
            oldest = next(iter(self._windows))
            if self._windows[oldest].until > now:
                return
            del self._windows[oldest]


def network_of(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return OTHERS
    return address if parsed.version == 4 else str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
