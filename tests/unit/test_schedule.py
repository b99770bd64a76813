"""Slots: calculated from the previous slot, by elapsed time or by the local time, which jumps twice a year."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.fleet.duration import format_duration, parse_duration
from app.fleet.engine.actions.schedule import MAX_MISSED_SLOTS, SKIP_TOLERANCE, Schedule

BERLIN = "Europe/Berlin"
# By default, an example that takes longer than 200 ms is a failure. On a busy machine, any example may take longer.
without_deadline = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cron(expression: str, zone: str = "UTC") -> Schedule:
    made = Schedule.of(None, expression, zone, None)
    assert made is not None
    return made


def every(duration: str) -> Schedule:
    made = Schedule.of(duration, None, "UTC", None)
    assert made is not None
    return made


def at(text: str, zone: str = "UTC") -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)


def slots(schedule: Schedule, since: datetime, count: int) -> list[str]:
    """Return the next slots in the local time of the schedule."""
    found = [schedule.after(since)]
    while len(found) < count:
        found.append(schedule.after(found[-1]))
    return [slot.astimezone(ZoneInfo(schedule.zone)).strftime("%d %H:%M %z") for slot in found]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60s", 60), ("5m", 300), ("1h30m", 5400), ("500ms", 0.5), ("1.5h", 5400), ("1 d", 86400), ("2w", 1209600)],
)
def test_a_duration_is_parsed_in_each_form(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 minutes", "-5s", "s", "1h-3m", "5S"])
def test_any_other_text_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration(text)


@without_deadline
@given(st.integers(100, 400 * 86_400_000))
def test_a_formatted_duration_can_be_parsed_again(milliseconds: int) -> None:
    assert parse_duration(format_duration(milliseconds / 1000)) == pytest.approx(milliseconds / 1000, rel=1e-9)


@pytest.mark.parametrize(
    "schedule",
    [
        every("90s"),
        every("100ms"),
        cron("*/5 * * * *"),
        cron("0 9 * * MON-FRI", BERLIN),
        Schedule.of("1h", None, "UTC", "5m"),
    ],
)
def test_a_formatted_schedule_can_be_parsed_again(schedule: Schedule) -> None:
    assert Schedule.parse(str(schedule)) == schedule


def test_an_interval_counts_from_the_slot_and_not_from_the_present_time() -> None:
    slot = at("2026-01-01 00:00")
    assert every("60s").due(slot, slot + timedelta(seconds=7), "once") == ([slot], slot + timedelta(seconds=60))


# -- daylight-saving time: in Berlin at 02:00 on 29 March to 03:00, at 03:00 on 25 October back to 02:00 --------------


def test_a_slot_in_the_missing_hour_is_once_right_after_it() -> None:
    daily = cron("30 2 * * *", BERLIN)
    assert slots(daily, at("2026-03-28 00:00", BERLIN), 3) == ["28 02:30 +0100", "29 03:00 +0200", "30 02:30 +0200"]


def test_a_slot_in_the_doubled_hour_occurs_once() -> None:
    daily = cron("30 2 * * *", BERLIN)
    assert slots(daily, at("2026-10-24 00:00", BERLIN), 3) == ["24 02:30 +0200", "25 02:30 +0200", "26 02:30 +0100"]


def test_a_schedule_shorter_than_an_hour_runs_through_both_changes() -> None:
    often = cron("*/30 * * * *", BERLIN)
    assert slots(often, at("2026-10-25 01:30", BERLIN), 5) == [
        "25 02:00 +0200",
        "25 02:30 +0200",
        "25 02:00 +0100",
        "25 02:30 +0100",
        "25 03:00 +0100",
    ]
    assert slots(often, at("2026-03-29 01:00", BERLIN), 3) == ["29 01:30 +0100", "29 03:00 +0200", "29 03:30 +0200"]


def test_the_same_hour_of_the_day_is_another_instant_after_the_change() -> None:
    morning = cron("0 9 * * *", BERLIN)
    before = morning.after(at("2026-03-28 00:00"))
    assert morning.after(before) - before == timedelta(hours=23)


# -- outages ----------------------------------------------------------------------------------------------------------


@without_deadline
@given(st.integers(1, 10_000), st.integers(0, 10**6))
def test_the_latest_slot_is_the_last_one_that_is_due(interval: int, late: int) -> None:
    slot, schedule = at("2026-01-01 00:00"), every(f"{interval}s")
    now = slot + timedelta(seconds=late)
    latest = schedule.latest(slot, now)
    assert slot <= latest <= now < schedule.after(latest)


@pytest.mark.parametrize("expression", ["*/7 * * * *", "0 3 * * *", "30 2 * * SUN", "* * * * * */10"])
def test_the_latest_slot_of_a_cron_schedule_is_found_backwards(expression: str) -> None:
    schedule = cron(expression, BERLIN)
    slot = schedule.after(at("2026-03-01 00:00"))
    now = at("2026-04-02 11:11:11")
    latest = schedule.latest(slot, now)
    assert latest <= now < schedule.after(latest)


def test_misfire_once_runs_only_for_the_latest_slot() -> None:
    slot = at("2026-01-01 00:00")
    due, following = every("1m").due(slot, slot + timedelta(minutes=10, seconds=1), "once")
    assert due == [slot + timedelta(minutes=10)]
    assert following == slot + timedelta(minutes=11)


def test_misfire_skip_runs_for_a_slot_that_is_a_few_seconds_late() -> None:
    slot = at("2026-01-01 00:00")
    for late, runs in ((SKIP_TOLERANCE - 1, [slot]), (SKIP_TOLERANCE + 1, [])):
        assert every("1m").due(slot, slot + timedelta(seconds=late), "skip")[0] == runs


def test_misfire_all_runs_for_each_missed_slot() -> None:
    slot = at("2026-01-01 00:00")
    due, following = every("1m").due(slot, slot + timedelta(minutes=3), "all")
    assert due == [slot + timedelta(minutes=number) for number in range(4)]
    assert following == slot + timedelta(minutes=4)


@pytest.mark.parametrize("schedule", [every("1m"), cron("* * * * *"), cron("0 * * * *", BERLIN)])
def test_misfire_all_runs_at_most_for_a_bounded_number_of_the_latest_slots(schedule: Schedule) -> None:
    slot, now = schedule.after(at("2025-01-01 00:00")), at("2026-01-01 00:00")
    made: list[datetime] = []
    following = slot
    while following <= now:
        due, following = schedule.due(following, now, "all")
        made += due
    assert len(made) == MAX_MISSED_SLOTS
    assert made[-1] == schedule.latest(slot, now)
    assert all(schedule.after(sooner) == later for sooner, later in pairwise(made))


@pytest.mark.parametrize("schedule", [every("1d"), cron("0 3 * * *", BERLIN)])
def test_misfire_all_runs_for_a_few_missed_slots_however_old_they_are(schedule: Schedule) -> None:
    slot, now = schedule.after(at("2025-01-01 00:00")), at("2025-04-01 12:00")
    assert schedule.due(slot, now, "all")[0][0] == slot


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cron": "61 * * * *"}, "'61 \\* \\* \\* \\*' is not valid: Bad minute"),
        ({"cron": "* * * *"}, "Wrong number of fields"),
        ({"cron": "0 0 30 2 *"}, "is not valid"),
        ({"cron": "* * * * *", "zone": "Mars/Olympus"}, "there is no time zone 'Mars/Olympus'"),
        ({"cron": "* * * * *", "zone": "../../etc/passwd"}, "there is no time zone"),
        ({"cron": "* * * * *", "every": "1m"}, "not both"),
        ({"every": "0s"}, "must be from 100ms"),
        ({"every": "2000d"}, "to 366d"),
        ({"every": "soon"}, "is not a duration"),
        ({"jitter": "5s"}, "`jitter` needs a schedule"),
        ({"every": "1m", "jitter": "500d"}, "`jitter` is"),
    ],
)
def test_an_invalid_schedule_is_refused_with_the_reason(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule.of(options.get("every"), options.get("cron"), options.get("zone", "UTC"), options.get("jitter"))
