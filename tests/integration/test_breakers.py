"""All instances share a breaker: it opens for all of them, one probe may enter, and a late result is ignored.

An instance here is a row of the register with a `Breakers` object of its own, which receives real notifications unless
it is deaf. `tests/instances/test_limits.py` has real processes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from app.fleet import BreakerOpen, FleetError, LimitReached, breaker
from app.fleet.cluster.registry import Identity
from app.fleet.coordination import breakers
from app.fleet.coordination.breaker_statements import ENTER_AS_PROBE, PROBE_ABANDONED, PROBE_SUCCEEDED
from app.fleet.coordination.breakers import Breaker, Breakers
from app.fleet.db.namespace import Statement
from app.fleet.errors import BreakerInvalid
from tests.support.engine_harness import EngineHarness, engine_harness
from tests.support.postgres import Postgres
from tests.support.proxy import Proxy
from tests.support.runs import soon
from tests.support.service import service

pytestmark = pytest.mark.anyio

NAME = "harbour: %s'{}🌊"


class DownError(Exception):
    """The other system does not answer."""


class Hand:
    """One instance: its breakers, and the part of a member that they use."""

    def __init__(self, here: EngineHarness, identity: Identity) -> None:
        self.identity = identity
        self.linked = True
        self.deaf = False
        self.listen: Callable[[str], None] = print
        self.relink: Callable[[], None] = print
        self.asked = 0
        self.breakers = Breakers(here.database, self)  # type: ignore[arg-type]
        fetch = self.breakers._fetch

        async def counted(*given: Any, **more: Any) -> Any:
            self.asked += 1
            return await fetch(*given, **more)

        self.breakers._fetch = counted  # type: ignore[method-assign]

    def holds(self) -> bool:
        return self.linked

    def on_notification(self, kind: str, listener: Callable[[str], None]) -> None:
        assert kind == "breaker"
        self.listen = listener

    def on_linked(self, hook: Callable[[], None]) -> None:
        self.relink = hook

    async def use(self, wanted: Breaker, error: BaseException | None = None) -> bool:
        """Run a block, which raises the error if there is one; false if the block was refused."""
        try:
            async with self.breakers.guard(wanted):
                if error is not None:
                    raise error
        except BreakerOpen:
            return False
        except DownError:
            pass
        return True

    @asynccontextmanager
    async def inside(self, wanted: Breaker) -> AsyncIterator[asyncio.Event]:
        """Keep a block of the breaker running while this block lasts, or until the event is set."""
        entered, leave = asyncio.Event(), asyncio.Event()

        async def stay() -> None:
            async with self.breakers.guard(wanted):
                entered.set()
                await leave.wait()

        staying = asyncio.create_task(stay())
        await asyncio.wait_for(entered.wait(), 60)
        try:
            yield leave
        finally:
            leave.set()
            await staying


class Crew(list[Hand]):
    here: EngineHarness

    async def row(self, columns: str) -> tuple[Any, ...]:
        (row,) = await self.here.sql(f"SELECT {columns} FROM breakers")
        return row

    async def rested(self) -> None:
        """End the rest now, for all instances."""
        await self.here.sql("UPDATE breakers SET open_until = clock_timestamp()")
        for hand in self:
            hand.relink()


@asynccontextmanager
async def crew_of(count: int, address: str, listening: str) -> AsyncIterator[Crew]:
    async with (
        engine_harness(address) as here,
        await psycopg.AsyncConnection.connect(listening, autocommit=True) as ear,
    ):
        crew = Crew()
        crew.here = here
        await here.sql("TRUNCATE breakers, instances")
        for number in range(count):
            crew.append(Hand(here, (await here.instance(f"i-{number}")).identity))
        await ear.execute("LISTEN flotilla")

        async def hear() -> None:
            async for said in ear.notifies():
                kind, _, rest = said.payload.partition(":")
                for hand in crew:
                    if kind == "breaker" and not hand.deaf:
                        hand.listen(rest)

        hearing = asyncio.create_task(hear())
        try:
            yield crew
        finally:
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)
            for hand in crew:
                await hand.breakers.stop()


@pytest.fixture(scope="module")
def sea(postgres: Postgres) -> Iterator[str]:
    """One database for all tests of this module; each deletes the rows of the test before it."""
    own = postgres.new_database()
    yield own
    postgres.drop(own)


@pytest.fixture
async def crew(sea: str) -> AsyncIterator[Crew]:
    async with crew_of(3, sea, sea) as own:
        yield own


def wanted(failures: int = 1, within: str = "60s", rest: str = "60s", probe_timeout: str = "60s") -> Breaker:
    return Breaker.of(NAME, failures, within, rest, probe_timeout)


async def refused(hand: Hand, given: Breaker) -> bool:
    return not await hand.use(given)


# -- opening ----------------------------------------------------------------------------------------------------------


async def test_failures_on_all_instances_together_open_it_for_all(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    # By notification alone: no instance reads the state again by itself.
    monkeypatch.setattr(breakers, "CLOSED_LIFETIME", 3600.0)
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 3600.0)
    given = wanted(failures=5)
    for hand in crew:
        assert await hand.use(given)
    for hand in (crew[0], crew[0], crew[1], crew[1]):
        assert await hand.use(given, DownError())
    assert await crew[2].use(given)
    await crew[0].use(given, DownError())
    for hand in crew:
        await soon(lambda hand=hand: refused(hand, given))  # type: ignore[misc]


async def test_a_refusal_says_for_how_long(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    for hand in crew[:2]:
        with pytest.raises(BreakerOpen, match=r"failed too often, and is not called for another 1m") as open_:
            async with hand.breakers.guard(wanted()):
                pytest.fail("it was let in")
        assert 50 < open_.value.retry_after <= 60


async def test_failures_count_only_within_their_period(crew: Crew) -> None:
    given = wanted(failures=2)
    await crew[0].use(given, DownError())
    await crew.here.sql("UPDATE breakers SET failed_at = ARRAY[clock_timestamp() - interval '61 s']")
    await crew[0].use(given, DownError())
    assert await crew.row("open_until, cardinality(failed_at)") == (None, 1)
    await crew[0].use(given, DownError())
    assert await refused(crew[0], given)


@pytest.mark.parametrize("no_failure", [asyncio.CancelledError(), LimitReached("no", 1.0), BreakerOpen("no", 1.0)])
async def test_cancellations_and_own_refusals_are_not_failures(crew: Crew, no_failure: BaseException) -> None:
    with pytest.raises(type(no_failure)):
        async with crew[0].breakers.guard(wanted()):
            raise no_failure
    assert await crew.here.sql("SELECT 1 FROM breakers") == []


async def test_a_block_that_entered_before_and_fails_while_the_breaker_is_open_does_not_count(crew: Crew) -> None:
    async with crew[0].inside(wanted()):
        await crew[1].use(wanted(), DownError())
        before = await crew.row("token, open_until, failed_at")
        crew[0].deaf = True
        await crew[0].breakers._failed(wanted(), None)
        assert await crew.row("token, open_until, failed_at") == before


# -- the probe --------------------------------------------------------------------------------------------------------


async def test_after_the_rest_one_block_in_the_whole_cluster_may_enter(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    waits, others_refused = list[float](), asyncio.Event()

    async def enter(hand: Hand) -> bool:
        try:
            async with hand.breakers.guard(wanted()):
                await others_refused.wait()
        except BreakerOpen as error:
            waits.append(error.retry_after)
            if len(waits) == 59:
                others_refused.set()
            return False
        return True

    # A second block inside would make this wait for ever.
    async with asyncio.timeout(60):
        entered = await asyncio.gather(*(enter(hand) for hand in crew for _ in range(20)))
    assert sum(entered) == 1
    assert all(0 < wait <= 1 for wait in waits)


async def test_the_success_of_the_probe_closes_it_for_all(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    async with crew[1].inside(wanted()):
        assert await refused(crew[2], wanted())
    for hand in crew:
        await soon(lambda hand=hand: hand.use(wanted()))  # type: ignore[misc]
    assert await crew.row("open_until, openings, probe_instance") == (None, 0, None)


async def test_the_failure_of_the_probe_opens_it_again_for_twice_as_long(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    for longer in (2, 4):
        await crew.rested()
        await crew[1].use(wanted(), DownError())
        with pytest.raises(BreakerOpen) as again:
            async with crew[2].breakers.guard(wanted()):
                pytest.fail("it was let in")
        assert 60 * longer - 10 < again.value.retry_after <= 60 * longer


async def test_after_a_cancelled_probe_the_next_block_may_probe(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    with pytest.raises(asyncio.CancelledError):
        async with crew[0].breakers.guard(wanted()):
            raise asyncio.CancelledError
    assert await soon(lambda: crew[1].use(wanted()))
    assert await crew.row("open_until") == (None,)


async def test_after_a_caller_that_was_cancelled_while_entering_as_probe_the_next_block_may_probe(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has the probe already; the answer is still in flight."""
    written, answered = asyncio.Event(), asyncio.Event()
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    fetch = crew[0].breakers._fetch

    async def answer_late(statement: Statement, *given: Any, **more: Any) -> Any:
        answer = await fetch(statement, *given, **more)
        if statement is ENTER_AS_PROBE:
            written.set()
            await answered.wait()
        return answer

    monkeypatch.setattr(crew[0].breakers, "_fetch", answer_late)
    impatient = asyncio.create_task(crew[0].use(wanted()))
    await written.wait()
    impatient.cancel()
    await asyncio.wait([impatient])
    answered.set()
    assert await soon(lambda: crew[1].use(wanted()))
    assert await crew.row("open_until") == (None,)


@pytest.mark.parametrize("error", [None, asyncio.CancelledError()], ids=["succeeded", "was cancelled"])
async def test_the_result_of_a_probe_is_written_as_soon_as_the_database_can_be_reached(
    crew: Crew, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    failures: list[str] = []
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    fetch = crew[0].breakers._fetch

    async def fail_twice(statement: Statement, *given: Any, **more: Any) -> Any:
        if statement in {PROBE_SUCCEEDED, PROBE_ABANDONED} and len(failures) < 2:
            failures.append(statement)
            raise psycopg.OperationalError("the database is away")
        return await fetch(statement, *given, **more)

    monkeypatch.setattr(crew[0].breakers, "_fetch", fail_twice)
    with suppress(asyncio.CancelledError):
        await crew[0].use(wanted(), error)

    async def no_probe() -> bool:
        return await crew.row("probe_instance") == (None,)

    await soon(no_probe)
    assert len(failures) == 2


async def test_the_next_block_may_probe_when_the_instance_of_the_first_is_gone(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    await crew.rested()
    async with crew[0].inside(wanted()):
        assert await refused(crew[1], wanted())
        await crew.here.sql("UPDATE instances SET state = 'gone' WHERE id = %s", crew[0].identity.id)
        crew[1].relink()
        assert await crew[1].use(wanted())


async def test_the_next_block_may_probe_after_the_timeout_and_the_result_of_the_first_is_ignored(crew: Crew) -> None:
    short = wanted(probe_timeout="100ms")
    await crew[0].use(short, DownError())
    await crew.rested()
    async with AsyncExitStack() as first:
        await first.enter_async_context(crew[0].inside(short))
        await asyncio.sleep(0.15)
        async with crew[1].inside(wanted()):
            second = await crew.row("token, open_until, probe_instance, probe_until")
            # The first probe succeeds.
            await first.aclose()
            assert await crew.row("token, open_until, probe_instance, probe_until") == second
            assert await refused(crew[2], wanted())


async def test_the_token_only_grows(crew: Crew) -> None:
    tokens = list[int]()
    for _ in range(3):
        await crew[0].use(wanted(), DownError())
        tokens += await crew.row("token")
        await crew.rested()
        await crew[0].use(wanted())
        tokens += await crew.row("token")
    assert tokens == sorted(set(tokens))


# -- the states of an instance ----------------------------------------------------------------------------------------


async def test_a_closed_breaker_is_read_once_for_very_many_uses(crew: Crew) -> None:
    await asyncio.gather(*(crew[0].use(wanted()) for _ in range(100)))
    for _ in range(100):
        await crew[0].use(wanted())
    assert crew[0].asked == 1


async def test_refusals_by_an_open_breaker_need_hardly_any_statement(crew: Crew) -> None:
    await crew[0].use(wanted(), DownError())
    await soon(lambda: refused(crew[1], wanted()))
    before = crew[1].asked
    for _ in range(100):
        assert await refused(crew[1], wanted())
    assert crew[1].asked - before <= 2


async def test_an_instance_that_missed_the_opening_learns_of_it_when_its_own_block_fails(
    crew: Crew,
) -> None:
    await crew[1].use(wanted())
    crew[1].deaf = True
    await crew[0].use(wanted(), DownError())
    assert await crew[1].use(wanted(), DownError())
    assert await refused(crew[1], wanted())


async def test_while_failures_count_other_instances_read_the_state_again_without_a_notification(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    given = wanted(failures=2)
    await crew[0].use(given, DownError())
    await crew[1].use(given)
    crew[1].deaf = True
    await crew[0].use(given, DownError())
    await soon(lambda: refused(crew[1], given))


async def test_without_its_link_an_instance_does_not_rely_on_notifications(
    crew: Crew, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    await crew[1].use(wanted())
    crew[1].deaf = True
    crew[1].linked = False
    await crew[0].use(wanted(), DownError())
    await soon(lambda: refused(crew[1], wanted()))


async def test_all_states_are_invalid_when_the_link_is_up_again(crew: Crew) -> None:
    await crew[1].use(wanted())
    crew[1].deaf = True
    await crew[0].use(wanted(), DownError())
    assert await crew[1].use(wanted())
    crew[1].relink()
    assert await refused(crew[1], wanted())


async def test_an_answer_that_is_older_than_a_notification_is_not_kept(crew: Crew) -> None:
    """Read before the breaker opened, and received after the notification."""
    slow, look = asyncio.Event(), crew[1].breakers._fetch

    async def slowly(*given: Any, **more: Any) -> Any:
        rows = await look(*given, **more)
        await slow.wait()
        return rows

    crew[1].breakers._fetch = slowly  # type: ignore[method-assign]
    using = asyncio.create_task(crew[1].use(wanted()))
    await soon(lambda: asked(crew[1]))
    await crew[0].use(wanted(), DownError())
    await soon(lambda: forgot(crew[1]))
    slow.set()
    await using
    assert await refused(crew[1], wanted())


async def asked(hand: Hand) -> bool:
    return hand.asked == 1


async def forgot(hand: Hand) -> bool:
    return hand.breakers._invalidations > 0


async def test_while_the_database_is_away_the_last_state_applies_and_an_unknown_breaker_refuses_nothing(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    with Proxy(("127.0.0.1", port)) as proxy:
        async with crew_of(2, address.replace(f":{port}/", f":{proxy.port}/"), address) as crew:
            await crew[0].use(wanted(), DownError())
            assert await refused(crew[0], wanted())
            proxy.refuse()
            proxy.cut()
            crew[0].linked = crew[1].linked = False
            await asyncio.sleep(0.2)
            assert await refused(crew[0], wanted())
            assert await crew[1].use(wanted())
            assert await crew[1].use(wanted(), DownError())
            proxy.heal()
            await soon(lambda: refused(crew[1], wanted()))


# -- the arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "the name of a breaker must have from 1 to 200 printable characters"),
        ({"name": "a\nb"}, "from 1 to 200 printable characters"),
        ({"failures": 0}, "`failures` is 0, and must be a whole number from 1 to 1000"),
        ({"failures": 1001}, "`failures` is 1001"),
        ({"failures": True}, "`failures` is True"),
        ({"within": "0s"}, "`within` is 0 s, and must be more"),
        ({"rest": "a while"}, "`rest`: 'a while' is not a duration"),
        ({"rest": -1}, "`rest` is -1 s, and must be from 0"),
        ({"probe_timeout": "2000d"}, "`probe_timeout` is"),
    ],
)
def test_invalid_arguments_are_refused(wrong: dict[str, Any], said: str) -> None:
    given = {"name": NAME, "failures": 5, "within": "60s", "rest": "30s", "probe_timeout": "60s"}
    with pytest.raises(BreakerInvalid, match=said):
        Breaker.of(**{**given, **wrong})


def test_a_breaker_outside_of_a_running_service_raises() -> None:
    with pytest.raises(FleetError, match="in the code of a running service"):
        breaker(NAME)


async def test_a_refused_route_answers_503_with_retry_after_on_every_instance(address: str) -> None:
    async with service(address) as one, service(address) as other:
        assert (await other.client.get("/trial/guarded", params={"fails": False})).status_code == 200
        assert (await one.client.get("/trial/guarded", params={"fails": True})).status_code == 502

        async def closed_to_the_other() -> bool:
            return (await other.client.get("/trial/guarded", params={"fails": False})).status_code == 503

        await soon(closed_to_the_other)
        answer = await other.client.get("/trial/guarded", params={"fails": False})
        assert answer.json()["type"] == "/problems/upstream-unavailable"
        assert 3500 < int(answer.headers["Retry-After"]) <= 3600
        text = (await other.client.get("/metrics")).text
        assert 'flotilla_breaker_open{name="trial"} 1.0' in text
        assert 'flotilla_breaker_opened_total{name="trial"} 1.0' in (await one.client.get("/metrics")).text
