"""All instances share a limit: it is exact, serves callers in order, and lets nothing pass without a permit.

An instance is a `Limits` object here, on one database; `tests/instances/test_limits.py` has real processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import psycopg
import pytest

from app.fleet import FleetError, LimitReached, limit
from app.fleet.cluster.link import clock
from app.fleet.coordination import limits as limits_module
from app.fleet.coordination import permits
from app.fleet.coordination.limits import Limits
from app.fleet.coordination.permits import MAX_ANSWER_TIME, Limit
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import fetch
from app.fleet.duration import RATE_TOLERANCE
from app.fleet.errors import LimitInvalid
from app.fleet.validation import check_duration
from tests.support.engine_harness import EngineHarness, engine_harness
from tests.support.limits import excess
from tests.support.postgres import BOUND, Postgres
from tests.support.proxy import Proxy
from tests.support.runs import soon
from tests.support.service import service

pytestmark = pytest.mark.anyio
ROUNDS = 5
WAITS_FOR_A_ROW = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller waits for the answer of the database, also on a busy machine."""
    monkeypatch.setattr(limits_module, "MIN_TIMEOUT", 60.0)


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No permit is lost because its answer, or the task that uses it, is late: on a busy machine, any may be."""
    monkeypatch.setattr(permits, "MAX_ANSWER_TIME", 60.0)
    monkeypatch.setattr(permits, "RATE_TOLERANCE", 60.0)


@pytest.fixture(scope="module")
def database_address(postgres: Postgres) -> Iterator[str]:
    """One database for all tests of this module; each deletes the limits of the test before it."""
    own = postgres.new_database()
    yield own
    postgres.drop(own)


@pytest.fixture
async def here(database_address: str) -> AsyncIterator[EngineHarness]:
    async with engine_harness(database_address) as own:
        await own.sql("TRUNCATE limits")
        yield own


async def work(limits: Limits, tides: Limit, count: int, instants: list[float], seconds: float) -> None:
    """Take permits again and again for some seconds, from `count` tasks."""

    async def take_permit() -> None:
        while True:
            await limits.take(tides, None)
            instants.append(clock())

    tasks = [asyncio.create_task(take_permit()) for _ in range(count)]
    await asyncio.sleep(seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await limits.stop()


async def used_until(here: EngineHarness) -> float:
    ((instant,),) = await here.sql("SELECT extract(epoch FROM used_until)::float8 FROM limits")
    return float(instant)


# -- the rate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 40])
async def test_all_instances_together_use_exactly_the_rate_in_any_period(
    here: EngineHarness, burst: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tides = Limit.of("tides", "200/s", burst)
    answer_times = list[float]()

    async def timed(*given: Any) -> Any:
        sent = clock()
        rows = await fetch(*given)
        answer_times.append(clock() - sent)
        return rows

    monkeypatch.setattr(permits, "fetch", timed)
    for _ in range(ROUNDS):
        await here.sql("TRUNCATE limits")
        instants, began = list[float](), clock()
        answer_times.clear()
        await asyncio.gather(*(work(Limits(here.database), tides, 30, instants, 1.0) for _ in range(3)))
        # One tolerance is the limit's, the other is for the machine that runs this test. The time of a permit counts
        # from the answer, and answers that took too long are discarded.
        late = 2 * RATE_TOLERANCE + min(max(answer_times), MAX_ANSWER_TIME)
        assert excess(instants, tides.interval, burst) <= late / tides.interval
        # Permits that arrive too late are lost, which happens on a busy machine, but not in every round.
        if len(instants) >= 0.8 * (burst + 200 * min(1.0, clock() - began)):
            return
    pytest.fail("the rate was not used in any round")


@pytest.mark.usefixtures("never_late")
async def test_a_burst_passes_at_once_and_the_next_caller_is_refused(here: EngineHarness) -> None:
    limits, tides = Limits(here.database), Limit.of("tides", "1/h", 50)
    await asyncio.gather(*(limits.take(tides, 0) for _ in range(50)))
    with pytest.raises(LimitReached):
        await limits.take(tides, 0)


@pytest.mark.usefixtures("never_late")
async def test_two_rates_of_one_name_each_advance_the_row_by_their_own_interval(here: EngineHarness) -> None:
    limits = Limits(here.database)
    await limits.take(Limit.of("tides", "1/m", 2), 0)
    before = await used_until(here)
    await limits.take(Limit.of("tides", "1/h", 2), 0)
    assert await used_until(here) - before == pytest.approx(3600, abs=0.001)


@pytest.mark.usefixtures("never_late")
async def test_limits_with_different_names_are_independent(here: EngineHarness) -> None:
    limits = Limits(here.database)
    for name in ("tides", "%s'{}:;", "潮汐 🌊"):
        await limits.take(Limit.of(name, "1/h", 1), 0)
    assert sorted(await here.sql("SELECT name FROM limits")) == [("%s'{}:;",), ("tides",), ("潮汐 🌊",)]


# -- waiting ----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("never_late")
async def test_a_refusal_has_the_time_to_try_again_and_uses_no_permit(here: EngineHarness) -> None:
    # So rare that a few seconds do not change the rounded time in the message.
    tides = Limit.of("tides", "1/10h", 1)
    await Limits(here.database).take(tides, 0)
    before = await used_until(here)
    with pytest.raises(LimitReached, match=r"the limit 'tides' of 1/10h is used up: try again in 10h") as refused:
        await Limits(here.database).take(tides, 0)
    assert 35_900 < refused.value.retry_after <= 36_000
    assert await used_until(here) == before


@pytest.mark.usefixtures("never_late")
async def test_a_caller_whose_wait_is_too_short_is_refused_at_once(here: EngineHarness) -> None:
    limits, tides = Limits(here.database), Limit.of("tides", "1/h", 1)
    await Limits(here.database).take(tides, 0)
    with pytest.raises(LimitReached):
        async with asyncio.timeout(BOUND):
            await limits.take(tides, 1800)
    before = await used_until(here)
    patient = asyncio.create_task(limits.take(tides, 5400))
    await soon(lambda: has_advanced(here, before))
    with pytest.raises(LimitReached):
        async with asyncio.timeout(BOUND):
            await limits.take(tides, 5400)
    assert not patient.done()
    patient.cancel()


async def has_advanced(here: EngineHarness, before: float) -> bool:
    return await used_until(here) > before


async def test_a_caller_whose_wait_is_long_enough_is_not_refused(here: EngineHarness) -> None:
    limits, tides = Limits(here.database), Limit.of("tides", "10/s", 1)
    began = clock()
    for _ in range(3):
        await limits.take(tides, BOUND)
    assert clock() - began > 0.18


@pytest.mark.usefixtures("never_late")
async def test_callers_are_served_in_the_order_of_their_calls(here: EngineHarness) -> None:
    limits, tides, served = Limits(here.database), Limit.of("tides", "200/s", 1), list[int]()

    async def take_permit(number: int) -> None:
        await limits.take(tides, None)
        served.append(number)

    await asyncio.gather(*(take_permit(number) for number in range(60)))
    assert served == list(range(60))


async def test_a_waiter_of_another_instance_does_not_wait_for_all_waiters_of_this_one(here: EngineHarness) -> None:
    # In the time in which the machine may stall, the crowd has far fewer permits than this instance may wait for.
    tides, crowded, instants = Limit.of("tides", "20/s", 1), Limits(here.database), list[float]()
    crowd_task = asyncio.create_task(work(crowded, tides, 500, instants, 10.0))
    await soon(lambda: has_served_some(instants))
    before = len(instants)
    await Limits(here.database).take(tides, None)
    assert len(instants) - before < 50
    crowd_task.cancel()
    await asyncio.gather(crowd_task, return_exceptions=True)
    await crowded.stop()


async def has_served_some(instants: list[float]) -> bool:
    return len(instants) > 3


@pytest.mark.usefixtures("never_late")
async def test_the_permit_of_a_cancelled_waiter_goes_to_the_next_waiter(here: EngineHarness) -> None:
    # Rare enough that the first waiter gives up before the time of its permit.
    limits, tides = Limits(here.database), Limit.of("tides", "1/5s", 1)
    await limits.take(tides, 0)
    before = await used_until(here)
    first, second = (asyncio.create_task(limits.take(tides, None)) for _ in range(2))
    await soon(lambda: has_leased(limits, tides))
    first.cancel()
    await second
    assert await used_until(here) - before == pytest.approx(tides.interval, abs=0.001)


async def has_leased(limits: Limits, tides: Limit) -> bool:
    """Whether the instance has a permit whose time has not come: known without a statement."""
    return bool(limits._queues[tides]._permits)


@pytest.mark.usefixtures("never_late")
async def test_an_unused_permit_is_kept_for_the_next_caller(
    here: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.coordination.permits.ANSWER_LIFETIME", 0.0)
    limits, tides = Limits(here.database), Limit.of("tides", "1/m", 1)
    await limits.take(tides, 0)
    before = await used_until(here)
    waiting = asyncio.create_task(limits.take(tides, None))
    await soon(lambda: has_advanced(here, before))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    limits._remove_idle()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limits.take(tides, None), 0.2)
    assert await used_until(here) - before == pytest.approx(tides.interval, abs=0.001)


@pytest.mark.usefixtures("never_late")
async def test_many_callers_share_few_statements_and_refusals_need_almost_none(
    here: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than all refusals together take.
    monkeypatch.setattr(permits, "ANSWER_LIFETIME", 60.0)
    limits, statements = Limits(here.database), 0
    connection = limits.connection

    def counted() -> AbstractAsyncContextManager[Connection]:
        nonlocal statements
        statements += 1
        return connection()

    limits.connection = counted
    await asyncio.gather(*(limits.take(Limit.of("tides", "1000/s", 1), None) for _ in range(200)))
    assert statements < 12
    await limits.take(Limit.of("tides", "1/m", 1), None)
    before = statements
    for _ in range(50):
        with pytest.raises(LimitReached):
            await limits.take(Limit.of("tides", "1/m", 1), 1)
    assert statements - before <= 1


@pytest.mark.usefixtures("never_late")
async def test_waiters_are_refused_when_the_instance_shuts_down(here: EngineHarness) -> None:
    limits, tides = Limits(here.database), Limit.of("tides", "1/m", 1)
    await limits.start()
    await limits.take(tides, 0)
    waiting = asyncio.create_task(limits.take(tides, None))
    await soon(lambda: has_waiter(limits))
    await limits.stop()
    with pytest.raises(LimitReached, match="this instance shuts down"):
        await waiting


async def has_waiter(limits: Limits) -> bool:
    return limits.waiting["tides"] == 1


# -- late permits -----------------------------------------------------------------------------------------------------


async def test_an_instance_that_was_frozen_uses_no_burst_of_permits_when_it_continues(
    here: EngineHarness,
) -> None:
    limits, tides, instants = Limits(here.database), Limit.of("tides", "1000/s", 1), list[float]()

    async def take_permit() -> None:
        await limits.take(tides, None)
        instants.append(clock())

    tasks = [asyncio.create_task(take_permit()) for _ in range(110)]
    await soon(lambda: has_served_some(instants), every=0.001)
    time.sleep(0.5)  # noqa: ASYNC251 — nothing here continues, as in a stopped process
    woken = clock()
    await asyncio.gather(*tasks)
    assert len([instant for instant in instants if woken <= instant < woken + 0.005]) < 20


async def test_a_task_that_continues_too_late_does_not_use_its_permit(here: EngineHarness) -> None:
    """Ten tasks receive a permit at once; the first blocks the loop, and ten others then pass on another instance."""
    limits, tides, instants = Limits(here.database), Limit.of("tides", "100/s", 10), list[float]()
    others: list[asyncio.Task[None]] = []

    async def take_permit(limits_: Limits) -> None:
        await limits_.take(tides, None)
        instants.append(clock())
        if not others:
            time.sleep(0.3)  # noqa: ASYNC251 — as above
            elsewhere = Limits(here.database)
            others.extend(asyncio.create_task(take_permit(elsewhere)) for _ in range(10))

    await asyncio.gather(*(take_permit(limits) for _ in range(10)))
    await asyncio.gather(*others)
    assert len(instants) == 20
    assert excess(instants, tides.interval, tides.burst) < 6


async def test_a_permit_is_never_used_early_even_after_a_slow_response(
    here: EngineHarness, database_address: str
) -> None:
    limits, tides = Limits(here.database), Limit.of("tides", "1/s", 1)
    await limits.take(tides, 0)
    instant = await used_until(here)
    with psycopg.connect(database_address) as holder:
        holder.execute("SELECT FROM flotilla.limits FOR UPDATE")
        waiting = asyncio.create_task(limits.take(tides, None))
        await asyncio.sleep(0.7 * MAX_ANSWER_TIME)
    await waiting
    # The server runs on this machine, and has its clock.
    assert time.time() >= instant


@pytest.mark.usefixtures("never_late")
async def test_permits_of_a_response_that_took_too_long_are_discarded(
    here: EngineHarness, database_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that was frozen while the answer was in flight cannot know the age of the answer."""
    limits, tides = Limits(here.database), Limit.of("tides", "1/m", 5)
    await limits.take(tides, 0)
    before = await used_until(here)
    sent = 0

    async def answer_first_too_late(*given: Any) -> Any:
        nonlocal sent
        sent += 1
        # Only the answer to the first statement is too late: on a busy machine, the next may take as long.
        monkeypatch.setattr(permits, "MAX_ANSWER_TIME", MAX_ANSWER_TIME if sent == 1 else 60.0)
        return await fetch(*given)

    monkeypatch.setattr(permits, "fetch", answer_first_too_late)
    with psycopg.connect(database_address) as holder:
        holder.execute("SELECT FROM flotilla.limits FOR UPDATE")
        waiting = asyncio.create_task(limits.take(tides, None))
        await soon(lambda: here.sql(WAITS_FOR_A_ROW))
        await asyncio.sleep(MAX_ANSWER_TIME + 0.2)  # so long that its answer is too late
        assert not waiting.done()
    await waiting
    assert await used_until(here) - before == pytest.approx(2 * tides.interval, abs=0.001)
    assert sent == 2


async def test_no_caller_passes_during_an_outage_and_waiting_callers_continue_after_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, port = "127.0.0.1", int(address.rpartition("/")[0].rpartition(":")[2])
    with Proxy((host, port)) as proxy:
        async with engine_harness(address.replace(f":{port}/", f":{proxy.port}/")) as here:
            limits, tides = Limits(here.database), Limit.of("tides", "10/s", 1)
            await limits.take(tides, None)
            proxy.refuse()
            proxy.cut()
            waiting = asyncio.create_task(limits.take(tides, None))
            await soon(lambda: knows_of_the_outage(limits, tides))
            # The next caller gives up after a second, as in the product.
            monkeypatch.setattr(limits_module, "MIN_TIMEOUT", 1.0)
            with pytest.raises(LimitReached, match="the database does not answer"):
                await limits.take(tides, 0.2)
            assert not waiting.done()
            proxy.heal()
            await asyncio.wait_for(waiting, 60)


async def knows_of_the_outage(limits: Limits, tides: Limit) -> bool:
    return not limits._queues[tides].database_answers


# -- the arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate", "burst", "message"),
    [
        ("tides", "0/s", 1, "'0/s' is not a rate: write it like '10/s'"),
        ("tides", "1/0s", 1, "is not a rate"),
        ("tides", "1/00s", 1, "is not a rate"),
        ("tides", "often", 1, "is not a rate"),
        ("tides", "10", 1, "is not a rate"),
        ("tides", "10/s", 0, "`burst` is 0, and must be a whole number from 1"),
        ("tides", "10/s", 1.5, "`burst` is 1.5"),
        ("tides", "1/d", 1000, "more than a year's worth"),
        ("", "10/s", 1, "from 1 to 200 printable characters"),
        ("x" * 201, "10/s", 1, "from 1 to 200 printable characters"),
        ("a\x00b", "10/s", 1, "from 1 to 200 printable characters"),
        (7, "10/s", 1, "from 1 to 200 printable characters"),
    ],
)
def test_invalid_arguments_are_refused(name: str, rate: str, burst: int, message: str) -> None:
    with pytest.raises(LimitInvalid, match=message.replace("(", r"\(")):
        Limit.of(name, rate, burst)


@pytest.mark.parametrize("wait", [-1, "soon", float("nan"), float("inf")])
def test_an_invalid_wait_is_refused(wait: float) -> None:
    with pytest.raises(LimitInvalid, match="`wait`"):
        check_duration("wait", wait, LimitInvalid)


async def test_a_limit_outside_of_a_running_service_raises() -> None:
    with pytest.raises(FleetError, match="in the code of a running service"):
        await limit("tides", "10/s")


@pytest.mark.usefixtures("never_late")
async def test_a_refused_route_answers_429_with_retry_after(address: str) -> None:
    async with service(address) as running:
        assert (await running.client.get("/trial/limited")).status_code == 200
        refused = await running.client.get("/trial/limited")
        assert refused.status_code == 429
        assert refused.json()["type"] == "/problems/too-many-requests"
        assert 3500 < int(refused.headers["Retry-After"]) <= 3600
        text = (await running.client.get("/metrics")).text
    assert 'flotilla_limit_permits_total{name="trial"} 1.0' in text
    assert 'flotilla_limit_refused_total{name="trial"} 1.0' in text
