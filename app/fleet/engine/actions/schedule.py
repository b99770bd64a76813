"""When an action is due: `every` so long, or `cron` in a time zone.

A slot is an instant at which an action is due. Slots are counted on from the last slot and never from the clock, so
that a late start moves none of those that follow. `every` counts seconds that really pass; `cron` reads the clock on
the wall of its zone, and goes through a change to or from daylight-saving time as Debian's cron does: what falls into
the missing hour runs right after it, once; what falls into the doubled hour runs once, unless it runs every hour or
more often, and then it runs in both.

    after an outage, slots were missed    misfire     runs
                                          once        one, for the latest of them
                                          all         one for each of the latest `MADE_UP_MOST`
                                          skip        none; one for the latest if that is hardly late (`HARDLY_LATE`)
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from itertools import islice, takewhile
from typing import Literal, Self
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from app.fleet.duration import MAX_DURATION, Duration, format_duration, parse_duration

Misfire = Literal["once", "all", "skip"]
Overlap = Literal["skip", "queue", "allow"]

HARDLY_LATE = 10.0
# How many missed slots one claim takes on; the next claim goes on from there.
AT_ONCE = 100
# With misfire="all", how many missed slots an action makes up. One that was gone for months makes no flood of runs.
MADE_UP_MOST = 1000
SHORTEST = 0.1
TEXT = re.compile(r"(?:every (?P<every>\S+)|cron (?P<cron>.+) in (?P<zone>\S+?))(?: jitter (?P<jitter>\S+))?")


@dataclass(frozen=True)
class Schedule:
    """One of `every` and `cron`."""

    every: float | None = None
    cron: str | None = None
    zone: str = "UTC"
    jitter: float = 0.0

    @classmethod
    def of(cls, every: Duration | None, cron: str | None, zone: str, jitter: Duration | None) -> Self | None:
        """Check what was declared; raise `ValueError` with what is wrong."""
        if every is not None and cron is not None:
            raise ValueError("give `every` or `cron`, not both")
        if every is None and cron is None:
            if jitter is not None:
                raise ValueError("`jitter` needs a schedule: give `every` or `cron`")
            return None
        made = cls(
            every=None if every is None else parse_duration(every),
            cron=None if cron is None else " ".join(cron.split()),
            zone=zone,
            jitter=0.0 if jitter is None else parse_duration(jitter),
        )
        made._check()
        return made

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str()` wrote."""
        found = TEXT.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is not a schedule")
        every, jitter = found["every"], found["jitter"]
        return cls(
            parse_duration(every) if every else None,
            found["cron"],
            found["zone"] or "UTC",
            parse_duration(jitter or 0.0),
        )

    def __str__(self) -> str:
        when = f"every {format_duration(self.every)}" if self.every is not None else f"cron {self.cron} in {self.zone}"
        return when + (f" jitter {format_duration(self.jitter)}" if self.jitter else "")

    # -- slots --------------------------------------------------------------------------------------------------------

    def after(self, instant: datetime) -> datetime:
        """Return the slot that follows a slot; or the first one, counted from now."""
        if self.every is not None:
            return instant + timedelta(seconds=self.every)
        return next_tick(self, instant)

    def latest(self, slot: datetime, now: datetime) -> datetime:
        """Return the last slot that is due by now, `slot` itself being due."""
        if self.every is not None:
            return slot + timedelta(seconds=self.every) * ((now - slot) // timedelta(seconds=self.every))
        if self.after(slot) > now:
            return slot
        # Backwards from just after now: an outage may have been long.
        return max(slot, next(self.ticks(now + timedelta(microseconds=1), backwards=True)))

    def due(self, slot: datetime, now: datetime, misfire: Misfire) -> tuple[list[datetime], datetime]:
        """Return the slots to run for, `slot` being due by now, and the slot that is next."""
        if misfire == "all":
            due = [self._first_made_up(slot, now)]
            while len(due) < AT_ONCE and (following := self.after(due[-1])) <= now:
                due.append(following)
            return due, self.after(due[-1])
        latest = self.latest(slot, now)
        late = (now - latest).total_seconds()
        return ([] if misfire == "skip" and late > HARDLY_LATE else [latest]), self.after(latest)

    def _first_made_up(self, slot: datetime, now: datetime) -> datetime:
        """Return the first slot that is not too long ago to be made up, `slot` being due by now."""
        if self.every is not None:
            step = timedelta(seconds=self.every)
            return slot + step * max(0, (now - slot) // step + 1 - MADE_UP_MOST)
        # Two ticks are at least a second apart.
        if now - slot < timedelta(seconds=MADE_UP_MOST):
            return slot
        ticks = self.ticks(now + timedelta(microseconds=1), backwards=True)
        later = list(islice(takewhile(lambda tick: tick > slot, ticks), MADE_UP_MOST))
        return later[-1] if len(later) == MADE_UP_MOST else slot

    def ticks(self, start: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        assert self.cron is not None
        ticks = CronSim(self.cron, start.astimezone(ZoneInfo(self.zone)), backwards)
        return (tick.astimezone(UTC) for tick in ticks)

    def _check(self) -> None:
        if self.every is not None and not SHORTEST <= self.every <= MAX_DURATION:
            bounds = f"from {format_duration(SHORTEST)} to {format_duration(MAX_DURATION)}"
            raise ValueError(f"`every` is {self.every:g} s, and must be {bounds}")
        try:
            ZoneInfo(self.zone)
        except (KeyError, ValueError, OSError) as error:
            raise ValueError(f"there is no time zone {self.zone!r}: use a name such as 'Europe/Berlin'") from error
        if self.cron is not None:
            try:
                list(islice(self.ticks(datetime.now(UTC)), 2))
            except CronSimError as error:
                raise ValueError(f"the cron expression {self.cron!r} is not valid: {error}") from error
            except (StopIteration, RuntimeError) as error:
                raise ValueError(f"the cron expression {self.cron!r} never comes: no such date exists") from error
        if not 0 <= self.jitter <= MAX_DURATION:
            raise ValueError(f"`jitter` is {self.jitter:g} s, and must be from 0 to {format_duration(MAX_DURATION)}")


@lru_cache(maxsize=10_000)
def next_tick(schedule: Schedule, instant: datetime) -> datetime:
    """Return the next tick of a cron schedule. Kept, because a thousand actions may share one, and a moment."""
    return next(schedule.ticks(instant))
