"""PostgreSQL's clock, as an instance knows it from answers that contain it.

It decides when to look for work, and nothing else: whether a run is due, PostgreSQL decides in the statement.
"""

from dataclasses import dataclass
from datetime import datetime, timedelta

LONG_AGO = datetime.fromisoformat("2000-01-01T00:00:00+00:00")


@dataclass
class ServerClock:
    """PostgreSQL's time at one moment of the event loop's clock."""

    at: datetime = LONG_AGO
    loop_at: float = 0.0

    @property
    def known(self) -> bool:
        """Whether an answer has come yet."""
        return self.loop_at != 0.0

    def learn(self, at: datetime, loop_at: float) -> None:
        self.at, self.loop_at = at, loop_at

    def instant(self, loop_time: float) -> datetime:
        """Return PostgreSQL's time at a time of the event loop, or a little less: an answer is older when it comes."""
        return self.at + timedelta(seconds=loop_time - self.loop_at)

    def loop_time(self, instant: datetime) -> float:
        """Return the event loop's time at an instant; 0, which is in the past, before the first answer."""
        if not self.known:
            return 0.0
        return self.loop_at + (instant - self.at).total_seconds()
