"""A background loop survives the errors of its steps, and logs each of them as its service has configured."""

import asyncio
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from app.fleet import background
from app.fleet.background import LoopErrors, jittered
from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import event_log

pytestmark = pytest.mark.anyio
log = event_log(__name__)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the requested pauses, which take no time."""
    requested: list[float] = []

    async def sleep(seconds: float) -> None:
        requested.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return requested


async def step(errors: LoopErrors, error: BaseException | None = None) -> None:
    async with errors.logged():
        if error is not None:
            raise error


def logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str, dict[str, Any]]]:
    return [(each.levelname, each.message, getattr(each, "fields", {})) for each in caplog.records]


def errors_of_test(warn_when: Callable[[int], bool] = lambda _: False, **options: Any) -> LoopErrors:
    return LoopErrors(log, service="tests", defect="test.defect", failed="test.failed", warn_when=warn_when, **options)


@pytest.fixture(autouse=True)
def every_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger=__name__)


@pytest.mark.parametrize("error", [psycopg.OperationalError("no\n answer"), DatabaseError("no answer")])
async def test_a_database_failure_is_logged_at_debug_in_one_line_with_the_fields(
    error: Exception, caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    await step(errors_of_test(retry_interval=0.5, what="feed"), error)
    assert logged(caplog) == [("DEBUG", "test.failed", {"what": "feed", "reason": "no answer"})]
    assert pauses == [0.5]


async def test_a_defect_is_logged_at_error_with_its_traceback_and_followed_by_a_pause(
    caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    defect = ZeroDivisionError()
    await step(errors_of_test(), defect)
    assert logged(caplog) == [("ERROR", "test.defect", {"service": "tests"})]
    assert caplog.records[0].exc_info is not None
    assert caplog.records[0].exc_info[1] is defect
    assert pauses == [background.DEFECT_PAUSE]


async def test_a_step_without_an_error_logs_nothing_and_does_not_pause(
    caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    await step(errors_of_test(retry_interval=0.5))
    assert (logged(caplog), pauses) == ([], [])


async def test_a_loop_can_log_one_warning_per_outage(caplog: pytest.LogCaptureFixture) -> None:
    errors = errors_of_test(lambda failures: failures == 1)
    for error in (DatabaseError(), DatabaseError(), None, DatabaseError()):
        await step(errors, error)
    assert [each.levelname for each in caplog.records] == ["WARNING", "DEBUG", "WARNING"]


async def test_a_loop_can_log_every_nth_consecutive_failure_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    errors = errors_of_test(lambda failures: failures % 3 == 0)
    for _ in range(6):
        await step(errors, DatabaseError())
    await step(errors)
    assert errors.failures == 0
    await step(errors, DatabaseError())
    assert [each.levelname[0] for each in caplog.records] == ["D", "D", "W", "D", "D", "W", "D"]


@pytest.mark.usefixtures("pauses")
async def test_a_defect_does_not_reset_the_count_of_consecutive_failures() -> None:
    errors = errors_of_test()
    for error in (DatabaseError(), ZeroDivisionError(), DatabaseError()):
        await step(errors, error)
    assert errors.failures == 2


async def test_a_loop_without_an_event_for_database_failures_logs_them_as_defects(
    caplog: pytest.LogCaptureFixture, pauses: list[float]
) -> None:
    await step(LoopErrors(log, service="tests", defect="test.defect"), psycopg.OperationalError())
    assert [each.message for each in caplog.records] == ["test.defect"]
    assert pauses == [background.DEFECT_PAUSE]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(1)])
async def test_a_cancellation_or_an_exit_ends_the_loop(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(type(error)):
        await step(errors_of_test(), error)
    assert logged(caplog) == []


async def test_a_loop_that_pauses_after_an_error_can_be_cancelled() -> None:
    task = asyncio.create_task(step(errors_of_test(retry_interval=3600), DatabaseError()))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await background.cancel_and_wait(task)
    assert task.cancelled()


def test_a_jittered_interval_is_at_most_a_quarter_longer_or_shorter() -> None:
    intervals = [jittered(2.0) for _ in range(100)]
    assert all(1.5 <= interval <= 2.5 for interval in intervals)
    assert len(set(intervals)) > 1
