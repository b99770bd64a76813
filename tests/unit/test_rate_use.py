"""How much of a rate is used, from the time until which it is used up."""

import pytest

from app.fleet.coordination.rate_use import RateUse


@pytest.mark.parametrize(
    ("interval", "burst", "ahead", "free", "seconds"),
    [
        (1.0, 1, None, 1, 0.0),
        (1.0, 1, -50.0, 1, 0.0),
        (1.0, 1, 0.4, 0, 0.4),
        (1.0, 10, 0.0, 10, 0.0),
        (1.0, 10, 9.0, 1, 0.0),
        (1.0, 10, 9.5, 0, 0.5),
        (1.0, 10, 10.0, 0, 1.0),
        (0.1, 3, 0.1 + 0.1, 1, 0.0),
        (3600.0, 1, 3600.0, 0, 3600.0),
    ],
)
def test_a_rate_has_free_permits_until_the_time_is_ahead_by_its_burst(
    interval: float, burst: int, ahead: float | None, free: int, seconds: float
) -> None:
    use = RateUse("tides", interval, burst, ahead)
    assert use.free == free
    assert use.seconds == pytest.approx(seconds)


def test_without_the_rate_only_a_time_that_has_passed_says_something() -> None:
    assert (RateUse("tides", None, None, -1.0).seconds, RateUse("tides", None, None, 3.0).seconds) == (0.0, None)
    assert RateUse("tides", None, None, -1.0).free is None
