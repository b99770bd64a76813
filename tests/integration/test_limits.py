"""A limit is one for the whole cluster: exact, in order, and closed to whoever has no permit.

Whoever is an instance here has limits of its own, on the one database; those of real processes are in
`tests/instances/test_limits.py`.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager

import psycopg
import pytest

from app.fleet import FleetError, LimitReached, limit
from app.fleet.cluster.link import clock
from app.fleet.coordination.limits import ANSWER_MOST, LATE, Limit, Limits
from app.fleet.db.pool import Connection
from app.fleet.errors import LimitInvalid
from app.fleet.validation import check_duration
from tests.support.engine_harness import EngineHarness, engine_harness
from tests.support.limits import excess
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.runs import soon
from tests.support.service import service

pytestmark = pytest.mark.anyio
ROUNDS = 5


@pytest.fixture(scope="module")
def sea(postgres: Postgres) -> Iterator[str]:
    """One database for all of these: a limit is left behind by each, and swept away by the next."""
    own = postgres.new_database()
    yield own
    postgres.drop(own)


@pytest.fixture
async def here(sea: str) -> AsyncIterator[EngineHarness]:
    async with engine_harness(sea) as own:
        await own.sql("TRUNCATE limits")
        yield own


async def work(limits: Limits, wanted: Limit, count: int, instants: list[float], seconds: float) -> None:
    """So many who ask again and again, for so long."""

    async def ask() -> None:
        while True:
            await limits.take(wanted, None)
            instants.append(clock())

    asking = [asyncio.create_task(ask()) for _ in range(count)]
    await asyncio.sleep(seconds)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    await limits.stop()


async def used_until(here: EngineHarness) -> float:
    ((instant,),) = await here.sql("SELECT extract(epoch FROM used_until)::float8 FROM limits")
    return float(instant)


# -- how many ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 40])
async def test_no_span_of_time_has_more_than_it_may_from_all_together_and_hardly_less(
    here: EngineHarness, burst: int
) -> None:
    wanted = Limit.of("tides", "200/s", burst)
    for _ in range(ROUNDS):
        await here.sql("TRUNCATE limits")
        instants, began = list[float](), clock()
        await asyncio.gather(*(work(Limits(here.database), wanted, 30, instants, 1.0) for _ in range(3)))
        # Half of what may be late is left for the machine that runs this.
        assert excess(instants, wanted.interval, burst) <= 2 * LATE / wanted.interval
        # Permits that come too late are lost. On a machine that is busy, that happens; in each round it does not.
        if len(instants) >= 0.8 * (burst + 200 * min(1.0, clock() - began)):
            return
    pytest.fail("hardly less than it may")


async def test_a_burst_is_let_through_at_once_and_not_one_more(here: EngineHarness) -> None:
    limits, wanted = Limits(here.database), Limit.of("tides", "1/h", 50)
    await asyncio.gather(*(limits.take(wanted, 0) for _ in range(50)))
    with pytest.raises(LimitReached):
        await limits.take(wanted, 0)


async def test_two_rates_of_one_name_each_move_it_on_by_their_own_interval(here: EngineHarness) -> None:
    limits = Limits(here.database)
    await limits.take(Limit.of("tides", "1/m", 2), 0)
    before = await used_until(here)
    await limits.take(Limit.of("tides", "1/h", 2), 0)
    assert await used_until(here) - before == pytest.approx(3600, abs=0.001)


async def test_each_name_has_its_own(here: EngineHarness) -> None:
    limits = Limits(here.database)
    for name in ("tides", "%s'{}:;", "潮汐 🌊"):
        await limits.take(Limit.of(name, "1/h", 1), 0)
    assert sorted(await here.sql("SELECT name FROM limits")) == [("%s'{}:;",), ("tides",), ("潮汐 🌊",)]


# -- who waits --------------------------------------------------------------------------------------------------------


async def test_who_does_not_want_to_wait_is_refused_and_told_when_and_has_taken_nothing(here: EngineHarness) -> None:
    wanted = Limit.of("tides", "1/m", 1)
    await Limits(here.database).take(wanted, 0)
    before = await used_until(here)
    with pytest.raises(LimitReached, match=r"the limit 'tides' of 1/m is used up: try again in 1m") as refused:
        await Limits(here.database).take(wanted, 0)
    assert 50 < refused.value.retry_after <= 60
    assert await used_until(here) == before


async def test_a_wait_that_is_too_short_is_refused_as_soon_as_that_is_certain(here: EngineHarness) -> None:
    limits, wanted = Limits(here.database), Limit.of("tides", "1/m", 1)
    await Limits(here.database).take(wanted, 0)
    with pytest.raises(LimitReached):
        async with asyncio.timeout(10):
            await limits.take(wanted, 30)
    before = await used_until(here)
    patient = asyncio.create_task(limits.take(wanted, 90))
    await soon(lambda: moved(here, before))
    with pytest.raises(LimitReached):
        async with asyncio.timeout(10):
            await limits.take(wanted, 90)
    assert not patient.done()
    patient.cancel()


async def moved(here: EngineHarness, before: float) -> bool:
    return await used_until(here) > before


async def test_a_wait_that_is_long_enough_is_not_refused(here: EngineHarness) -> None:
    limits, wanted = Limits(here.database), Limit.of("tides", "10/s", 1)
    began = clock()
    for _ in range(3):
        await limits.take(wanted, 5)
    assert clock() - began > 0.18


async def test_first_come_is_first_served(here: EngineHarness) -> None:
    limits, wanted, served = Limits(here.database), Limit.of("tides", "200/s", 1), list[int]()

    async def ask(number: int) -> None:
        await limits.take(wanted, None)
        served.append(number)

    await asyncio.gather(*(ask(number) for number in range(60)))
    assert served == list(range(60))


async def test_one_who_waits_elsewhere_does_not_wait_for_all_of_a_crowd_here(here: EngineHarness) -> None:
    wanted, crowded, instants = Limit.of("tides", "100/s", 1), Limits(here.database), list[float]()
    crowd = asyncio.create_task(work(crowded, wanted, 500, instants, 5.0))
    await soon(lambda: served_some(instants))
    before = len(instants)
    await Limits(here.database).take(wanted, None)
    assert len(instants) - before < 50
    crowd.cancel()
    await asyncio.gather(crowd, return_exceptions=True)
    await crowded.stop()


async def served_some(instants: list[float]) -> bool:
    return len(instants) > 3


async def test_the_permit_of_one_who_gave_up_goes_to_the_next(here: EngineHarness) -> None:
    # So seldom that the first has not had its permit when it gives up.
    limits, wanted = Limits(here.database), Limit.of("tides", "1/3s", 1)
    await limits.take(wanted, 0)
    before = await used_until(here)
    first, second = (asyncio.create_task(limits.take(wanted, None)) for _ in range(2))
    await soon(lambda: moved(here, before))
    first.cancel()
    await second
    assert await used_until(here) - before == pytest.approx(wanted.interval, abs=0.001)


async def test_it_is_kept_for_whoever_comes_next_until_its_time(
    here: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.coordination.limits.BELIEVED", 0.0)
    limits, wanted = Limits(here.database), Limit.of("tides", "1/m", 1)
    await limits.take(wanted, 0)
    before = await used_until(here)
    waiting = asyncio.create_task(limits.take(wanted, None))
    await soon(lambda: moved(here, before))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    limits._forget_idle()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(limits.take(wanted, None), 0.2)
    assert await used_until(here) - before == pytest.approx(wanted.interval, abs=0.001)


async def test_many_are_served_by_few_statements_and_those_who_are_refused_by_none(here: EngineHarness) -> None:
    limits, asked = Limits(here.database), 0
    connection = limits.connection

    def counted() -> AbstractAsyncContextManager[Connection]:
        nonlocal asked
        asked += 1
        return connection()

    limits.connection = counted
    await asyncio.gather(*(limits.take(Limit.of("tides", "1000/s", 1), None) for _ in range(200)))
    assert asked < 12
    await limits.take(Limit.of("tides", "1/m", 1), None)
    before = asked
    for _ in range(50):
        with pytest.raises(LimitReached):
            await limits.take(Limit.of("tides", "1/m", 1), 1)
    assert asked - before <= 1


async def test_whoever_still_waits_when_the_instance_leaves_is_told_so(here: EngineHarness) -> None:
    limits, wanted = Limits(here.database), Limit.of("tides", "1/m", 1)
    await limits.start()
    await limits.take(wanted, 0)
    waiting = asyncio.create_task(limits.take(wanted, None))
    await soon(lambda: waits(limits))
    await limits.stop()
    with pytest.raises(LimitReached, match="this instance leaves"):
        await waiting


async def waits(limits: Limits) -> bool:
    return limits.waiting["tides"] == 1


# -- too late ---------------------------------------------------------------------------------------------------------


async def test_who_was_frozen_lets_no_heap_through_on_waking(here: EngineHarness) -> None:
    limits, wanted, instants = Limits(here.database), Limit.of("tides", "1000/s", 1), list[float]()

    async def ask() -> None:
        await limits.take(wanted, None)
        instants.append(clock())

    asking = [asyncio.create_task(ask()) for _ in range(110)]
    await soon(lambda: served_some(instants), every=0.001)
    time.sleep(0.5)  # noqa: ASYNC251 — nothing here goes on meanwhile, as in a process that is stopped
    woken = clock()
    await asyncio.gather(*asking)
    assert len([instant for instant in instants if woken <= instant < woken + 0.005]) < 20


async def test_a_permit_that_was_handed_to_one_who_woke_too_late_is_not_used(here: EngineHarness) -> None:
    """Ten are let through in the same moment. The first keeps the nine others from noticing, until ten more may."""
    limits, wanted, instants = Limits(here.database), Limit.of("tides", "100/s", 10), list[float]()
    others: list[asyncio.Task[None]] = []

    async def ask(whose: Limits) -> None:
        await whose.take(wanted, None)
        instants.append(clock())
        if not others:
            time.sleep(0.3)  # noqa: ASYNC251 — as above
            elsewhere = Limits(here.database)
            others.extend(asyncio.create_task(ask(elsewhere)) for _ in range(10))

    await asyncio.gather(*(ask(limits) for _ in range(10)))
    await asyncio.gather(*others)
    assert len(instants) == 20
    assert excess(instants, wanted.interval, wanted.burst) < 6


async def test_a_permit_is_never_given_early_however_long_the_answer_took(here: EngineHarness, sea: str) -> None:
    limits, wanted = Limits(here.database), Limit.of("tides", "1/s", 1)
    await limits.take(wanted, 0)
    instant = await used_until(here)
    with psycopg.connect(sea) as holder:
        holder.execute("SELECT FROM flotilla.limits FOR UPDATE")
        waiting = asyncio.create_task(limits.take(wanted, None))
        await asyncio.sleep(0.7 * ANSWER_MOST)
    await waiting
    # The server runs on this machine, and has its clock.
    assert time.time() >= instant


async def test_an_answer_that_took_too_long_counts_for_nothing(here: EngineHarness, sea: str) -> None:
    """Whoever was frozen while it was on its way cannot know how old it is."""
    limits, wanted = Limits(here.database), Limit.of("tides", "1/m", 5)
    await limits.take(wanted, 0)
    before = await used_until(here)
    with psycopg.connect(sea) as holder:
        holder.execute("SELECT FROM flotilla.limits FOR UPDATE")
        waiting = asyncio.create_task(limits.take(wanted, None))
        await asyncio.sleep(ANSWER_MOST + 0.2)
        assert not waiting.done()
    await waiting
    assert await used_until(here) - before == pytest.approx(2 * wanted.interval, abs=0.001)


async def test_while_the_database_is_away_nobody_passes_and_then_they_do(address: str) -> None:
    host, port = "127.0.0.1", int(address.rpartition("/")[0].rpartition(":")[2])
    with Proxy((host, port)) as proxy:
        async with engine_harness(address.replace(f":{port}/", f":{proxy.port}/")) as here:
            limits, wanted = Limits(here.database), Limit.of("tides", "10/s", 1)
            await limits.take(wanted, 0)
            proxy.refuse()
            proxy.cut()
            waiting = asyncio.create_task(limits.take(wanted, None))
            with pytest.raises(LimitReached, match="the database does not answer"):
                await limits.take(wanted, 0.2)
            assert not waiting.done()
            proxy.heal()
            await asyncio.wait_for(waiting, 60)


# -- what is asked for ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rate", "burst", "said"),
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
def test_what_cannot_be_is_refused(name: str, rate: str, burst: int, said: str) -> None:
    with pytest.raises(LimitInvalid, match=said.replace("(", r"\(")):
        Limit.of(name, rate, burst)


@pytest.mark.parametrize("wait", [-1, "soon", float("nan"), float("inf")])
def test_a_wait_that_cannot_be_is_refused(wait: float) -> None:
    with pytest.raises(LimitInvalid, match="`wait`"):
        check_duration("wait", wait, LimitInvalid)


async def test_outside_of_a_running_service_there_is_no_limit() -> None:
    with pytest.raises(FleetError, match="in the code of a running service"):
        await limit("tides", "10/s")


async def test_a_route_that_is_refused_answers_429_and_says_when(address: str) -> None:
    async with service(address) as running:
        assert (await running.client.get("/trial/limited")).status_code == 200
        refused = await running.client.get("/trial/limited")
        assert refused.status_code == 429
        assert refused.json()["type"] == "/problems/too-many-requests"
        assert 3500 < int(refused.headers["Retry-After"]) <= 3600
        text = (await running.client.get("/metrics")).text
    assert 'flotilla_limit_permits_total{name="trial"} 1.0' in text
    assert 'flotilla_limit_refused_total{name="trial"} 1.0' in text
