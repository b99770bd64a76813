"""Rates as people write them: `10/s`, `100/m`, `5/10s`. For actions, and for the limits of a service's own code."""

import re
from dataclasses import dataclass
from typing import Self

from app.fleet.duration import seconds

RATE = re.compile(r"(\d{1,9})/(\d{0,9})(ms|[smhd])")


@dataclass(frozen=True)
class Rate:
    """One each `interval` seconds, in the whole cluster; of an action, up to `burst` at once after a pause."""

    interval: float
    burst: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `10/s`, `100/m` or `5/10s`."""
        found = RATE.fullmatch(text.replace(" ", ""))
        if found is None or int(found[1]) == 0 or int(found[2] or 1) == 0:
            raise ValueError(f"{text!r} is not a rate: write it like '10/s', '100/m' or '5/10s'")
        count = int(found[1])
        return cls(interval=seconds(f"{found[2] or 1}{found[3]}") / count, burst=count)
