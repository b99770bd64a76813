"""How much of a rate is used, from the time until which it is used up: for operators, of limits and of actions.

Both advance that time by one interval for each permit, or start (GCRA: `limits.py`, `runs/claim.py`). It may be ahead
of the clock by the intervals of the burst. So it says nothing by itself: with a burst of 10, a time that is nine
intervals ahead leaves one permit for now.
"""

import math
from dataclasses import dataclass

from psycopg.rows import class_row

from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.duration import format_rate

# In the order of the primary key, so that the read is short however many limits there are. A row without a rate was
# inserted by hand, or by a release that does not write it.
READ_LIMITS = Statement("""
SELECT name, rate_interval, rate_burst, extract(epoch FROM used_until - clock_timestamp())::float8 AS ahead
FROM {schema}.limits
ORDER BY name
LIMIT %(limit)s
""")


@dataclass(frozen=True, slots=True)
class RateUse:
    """The use of a limit."""

    name: str
    # None if the row does not say it.
    rate_interval: float | None
    rate_burst: int | None
    # For how many seconds the rate is used up; negative if that time has passed, None if it was never used.
    ahead: float | None

    @property
    def rate(self) -> str | None:
        return None if self.rate_interval is None else format_rate(self.rate_interval)

    @property
    def seconds(self) -> float | None:
        """In how many seconds the next permit is free; 0 for now, None if that is unknown."""
        if self.rate_interval is None or self.rate_burst is None:
            # The time is ahead by the burst at most, which is unknown.
            return 0.0 if (self.ahead or 0.0) <= 0 else None
        return max(0.0, (self.ahead or 0.0) - (self.rate_burst - 1) * self.rate_interval)

    @property
    def free(self) -> int | None:
        """How many permits are free now; None if that is unknown."""
        if self.rate_interval is None or self.rate_burst is None:
            return None
        used = max(0.0, self.ahead or 0.0) / self.rate_interval
        # Without the small number, a permit could be missing because of rounding.
        return max(0, math.floor(self.rate_burst - used + 1e-6))


async def read_limits(connection: Connection, namespace: Namespace, *, limit: int) -> list[RateUse]:
    async with connection.cursor(row_factory=class_row(RateUse)) as cursor:
        await cursor.execute(namespace.sql(READ_LIMITS), {"limit": limit})
        return await cursor.fetchall()
