"""`Timings` counts each duration in the buckets of a cumulative histogram."""

import pytest

from app.fleet.telemetry.timings import BOUNDS, Timings, TimingsByName


def counts(timings: Timings) -> dict[float, float]:
    return {float(bound): count for bound, count in timings.buckets()}


def test_a_bucket_has_all_durations_below_its_bound() -> None:
    durations = [0, 1, 255, 256, 1000, 1_000_000, 59_000_000, 3_600_000_000, 10**12]
    timings = Timings()
    timings.add(durations[:4])
    timings.add(durations[4:])
    expected = {bound: sum(each < bound * 1e6 for each in durations) for bound in BOUNDS}
    assert counts(timings) == expected | {float("inf"): len(durations)}
    assert timings.seconds == pytest.approx(sum(durations) / 1e6)


def test_a_clock_that_is_a_little_behind_counts_as_no_time() -> None:
    """PostgreSQL's clock, as an instance knows it, may be behind the clock in the row."""
    timings = Timings()
    timings.add([-200])
    assert set(counts(timings).values()) == {1}
    assert timings.seconds == 0


def test_each_name_has_a_histogram_of_its_own() -> None:
    histogram = TimingsByName("waits_seconds", "Waits", "action")
    histogram.of("a").add([10])
    histogram.of("b").add([10, 20])
    (family,) = histogram.collect()
    found = {sample.labels["action"]: sample.value for sample in family.samples if sample.name.endswith("_count")}
    assert found == {"a": 1, "b": 2}
