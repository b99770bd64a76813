"""Schedules: an action is due `every` interval, or by a `cron` expression in a time zone.

A slot is an instant at which an action is due. Each slot is computed from the previous slot, not from the clock, so a
late start does not move the following slots. `every` counts elapsed seconds. `cron` uses the local time of its zone,
and handles changes of daylight-saving time like Debian's cron: a slot in the missing hour is due once, right after it;
a slot in the repeated hour is due once, or twice if the action is due at least every hour.

    misfire     runs for slots that were missed during an outage
    once        one run, for the latest slot
    all         one run for each of the latest `MAX_MISSED_SLOTS` slots
    skip        none; but one for the latest slot if it is at most `SKIP_TOLERANCE` late
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

SKIP_TOLERANCE = 10.0
# With misfire="all", how many missed slots one transaction of the scheduler handles; the next one continues.
SLOTS_AT_ONCE = 100
# With misfire="all", how many missed slots are handled at all. After months, there is no flood of runs.
MAX_MISSED_SLOTS = 1000
MIN_INTERVAL = 0.1
TEXT = re.compile(r"(?:every (?P<every>\S+)|cron (?P<cron>.+) in (?P<zone>\S+?))(?: jitter (?P<jitter>\S+))?")


@dataclass(frozen=True)
class Schedule:
    """Either `every` or `cron`."""

    every: float | None = None
    cron: str | None = None
    zone: str = "UTC"
    jitter: float = 0.0

    @classmethod
    def of(cls, every: Duration | None, cron: str | None, zone: str, jitter: Duration | None) -> Self | None:
        """Return the schedule of these options, None without one; raise `ValueError` if they are invalid."""
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
        """Parse the text that `str()` returned."""
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
        """Return the slot after this slot; or after now, for the first slot."""
        if self.every is not None:
            return instant + timedelta(seconds=self.every)
        return next_tick(self, instant)

    def latest(self, slot: datetime, now: datetime) -> datetime:
        """Return the latest slot that is due; `slot` is due."""
        if self.every is not None:
            return slot + timedelta(seconds=self.every) * ((now - slot) // timedelta(seconds=self.every))
        if self.after(slot) > now:
            return slot
        # Backwards from now, because there may be very many slots since `slot`.
        return max(slot, next(self.ticks(now + timedelta(microseconds=1), backwards=True)))

    def due(self, slot: datetime, now: datetime, misfire: Misfire) -> tuple[list[datetime], datetime]:
        """Return the slots that get a run, and the next slot; `slot` is due."""
        if misfire == "all":
            due = [self._first_missed(slot, now)]
            while len(due) < SLOTS_AT_ONCE and (following := self.after(due[-1])) <= now:
                due.append(following)
            return due, self.after(due[-1])
        latest = self.latest(slot, now)
        late = (now - latest).total_seconds()
        return ([] if misfire == "skip" and late > SKIP_TOLERANCE else [latest]), self.after(latest)

    def _first_missed(self, slot: datetime, now: datetime) -> datetime:
        """Return the first of the latest `MAX_MISSED_SLOTS` slots since `slot`, which is due."""
        if self.every is not None:
            step = timedelta(seconds=self.every)
            return slot + step * max(0, (now - slot) // step + 1 - MAX_MISSED_SLOTS)
        # Ticks are at least a second apart.
        if now - slot < timedelta(seconds=MAX_MISSED_SLOTS):
            return slot
        ticks = self.ticks(now + timedelta(microseconds=1), backwards=True)
        later = list(islice(takewhile(lambda tick: tick > slot, ticks), MAX_MISSED_SLOTS))
        return later[-1] if len(later) == MAX_MISSED_SLOTS else slot

    def ticks(self, start: datetime, *, backwards: bool = False) -> Iterator[datetime]:
        assert self.cron is not None
        ticks = CronSim(self.cron, start.astimezone(ZoneInfo(self.zone)), backwards)
        return (tick.astimezone(UTC) for tick in ticks)

    def _check(self) -> None:
        if self.every is not None and not MIN_INTERVAL <= self.every <= MAX_DURATION:
            bounds = f"from {format_duration(MIN_INTERVAL)} to {format_duration(MAX_DURATION)}"
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
    """Return the next tick of a cron schedule. Cached: a thousand actions may have the same schedule and slot."""
    return next(schedule.ticks(instant))
