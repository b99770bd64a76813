"""All instances share a breaker: it opens for all of them, one probe may enter, and a late result is ignored.

An instance here is a row of the registry with its own `Breakers` object, which receives real notifications unless
`ignores_notifications` is set. `tests/instances/test_limits.py` has real processes.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import psycopg
import pytest

from app.fleet import BreakerOpen, FleetError, LimitReached, breaker
from app.fleet.cluster.link import clock
from app.fleet.cluster.registry import Identity
from app.fleet.coordination import breaker_admin, breakers
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


class BreakerInstance:
    """One instance: its breakers, and the part of a member that they use."""

    def __init__(self, here: EngineHarness, identity: Identity) -> None:
        self.identity = identity
        self.linked = True
        self.ignores_notifications = False
        self.notify: Callable[[str], None] = print
        self.relink: Callable[[], None] = print
        self.statements = 0
        self.breakers = Breakers(here.database, self)  # type: ignore[arg-type]
        fetch = self.breakers._fetch

        async def counted(*given: Any, **more: Any) -> Any:
            self.statements += 1
            return await fetch(*given, **more)

        self.breakers._fetch = counted  # type: ignore[method-assign]

    def holds(self) -> bool:
        return self.linked

    def on_notification(self, kind: str, listener: Callable[[str], None]) -> None:
        assert kind == "breaker"
        self.notify = listener

    def on_linked(self, hook: Callable[[], None]) -> None:
        self.relink = hook

    async def use(self, used: Breaker, error: BaseException | None = None) -> bool:
        """Run a block, which raises the error if there is one; false if the block was refused."""
        try:
            async with self.breakers.guard(used):
                if error is not None:
                    raise error
        except BreakerOpen:
            return False
        except DownError:
            pass
        return True

    @asynccontextmanager
    async def inside(self, used: Breaker) -> AsyncIterator[asyncio.Event]:
        """Keep a block of the breaker running while this block lasts, or until the event is set."""
        entered, leave = asyncio.Event(), asyncio.Event()

        async def stay() -> None:
            async with self.breakers.guard(used):
                entered.set()
                await leave.wait()

        staying = asyncio.create_task(stay())
        await asyncio.wait_for(entered.wait(), 60)
        try:
            yield leave
        finally:
            leave.set()
            await staying


class BreakerInstances(list[BreakerInstance]):
    here: EngineHarness

    async def row(self, columns: str) -> tuple[Any, ...]:
        (row,) = await self.here.sql(f"SELECT {columns} FROM breakers")
        return row

    async def end_rest(self) -> None:
        """End the rest now, for all instances."""
        await self.here.sql("UPDATE breakers SET open_until = clock_timestamp()")
        for instance in self:
            instance.relink()


@asynccontextmanager
async def start_instances(count: int, address: str, listening: str) -> AsyncIterator[BreakerInstances]:
    async with (
        engine_harness(address) as here,
        await psycopg.AsyncConnection.connect(listening, autocommit=True) as listener_connection,
    ):
        instances = BreakerInstances()
        instances.here = here
        await here.sql("TRUNCATE breakers, instances")
        for number in range(count):
            instances.append(BreakerInstance(here, (await here.instance(f"i-{number}")).identity))
        await listener_connection.execute("LISTEN flotilla")

        async def forward_notifications() -> None:
            async for message in listener_connection.notifies():
                kind, _, rest = message.payload.partition(":")
                for instance in instances:
                    if kind == "breaker" and not instance.ignores_notifications:
                        instance.notify(rest)

        forwarding = asyncio.create_task(forward_notifications())
        try:
            yield instances
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)
            for instance in instances:
                await instance.breakers.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block waits for the database until it answers, also on a busy machine: an unknown breaker would be closed."""
    monkeypatch.setattr(breakers, "DATABASE_TIMEOUT", 60.0)


@pytest.fixture(scope="module")
def database_address(postgres: Postgres) -> Iterator[str]:
    """One database for all tests of this module; each deletes the rows of the test before it."""
    own = postgres.new_database()
    yield own
    postgres.drop(own)


@pytest.fixture
async def instances(database_address: str) -> AsyncIterator[BreakerInstances]:
    async with start_instances(3, database_address, database_address) as own:
        yield own


def make_breaker(failures: int = 1, within: str = "60s", rest: str = "60s", probe_timeout: str = "60s") -> Breaker:
    return Breaker.of(NAME, failures, within, rest, probe_timeout)


async def is_refused(instance: BreakerInstance, given: Breaker) -> bool:
    return not await instance.use(given)


# -- opening ----------------------------------------------------------------------------------------------------------


async def test_failures_on_all_instances_together_open_the_breaker_for_all(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only notifications can open it: no instance reads the state again by itself.
    monkeypatch.setattr(breakers, "CLOSED_LIFETIME", 3600.0)
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 3600.0)
    given = make_breaker(failures=5)
    for instance in instances:
        assert await instance.use(given)
    for instance in (instances[0], instances[0], instances[1], instances[1]):
        assert await instance.use(given, DownError())
    assert await instances[2].use(given)
    await instances[0].use(given, DownError())
    for instance in instances:
        await soon(lambda instance=instance: is_refused(instance, given))  # type: ignore[misc]


async def test_a_refusal_has_the_time_until_the_next_probe(instances: BreakerInstances) -> None:
    # So long that a few seconds do not change the rounded time in the message.
    given = make_breaker(rest="10h")
    await instances[0].use(given, DownError())
    for instance in instances[:2]:
        with pytest.raises(BreakerOpen, match=r"failed too often, and is not called for another 10h") as open_:
            async with instance.breakers.guard(given):
                pytest.fail("the block was entered")
        assert 35_900 < open_.value.retry_after <= 36_000


async def test_failures_count_only_within_the_given_period(instances: BreakerInstances) -> None:
    given = make_breaker(failures=2)
    await instances[0].use(given, DownError())
    await instances.here.sql("UPDATE breakers SET failed_at = ARRAY[clock_timestamp() - interval '61 s']")
    await instances[0].use(given, DownError())
    assert await instances.row("open_until, cardinality(failed_at)") == (None, 1)
    await instances[0].use(given, DownError())
    assert await is_refused(instances[0], given)


@pytest.mark.parametrize("no_failure", [asyncio.CancelledError(), LimitReached("no", 1.0), BreakerOpen("no", 1.0)])
async def test_cancellations_and_refusals_by_the_service_are_not_failures(
    instances: BreakerInstances, no_failure: BaseException
) -> None:
    with pytest.raises(type(no_failure)):
        async with instances[0].breakers.guard(make_breaker()):
            raise no_failure
    assert await instances.here.sql("SELECT 1 FROM breakers") == []


async def test_a_block_that_entered_before_the_opening_and_then_fails_does_not_count(
    instances: BreakerInstances,
) -> None:
    async with instances[0].inside(make_breaker()):
        await instances[1].use(make_breaker(), DownError())
        before = await instances.row("token, open_until, failed_at")
        instances[0].ignores_notifications = True
        await instances[0].breakers._failed(make_breaker(), None)
        assert await instances.row("token, open_until, failed_at") == before


# -- the probe --------------------------------------------------------------------------------------------------------


async def test_after_the_rest_only_one_block_in_the_cluster_may_enter(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    waits, others_refused = list[float](), asyncio.Event()

    async def enter(instance: BreakerInstance) -> bool:
        try:
            async with instance.breakers.guard(make_breaker()):
                await others_refused.wait()
        except BreakerOpen as error:
            waits.append(error.retry_after)
            if len(waits) == 59:
                others_refused.set()
            return False
        return True

    # If a second block entered, this would not end.
    async with asyncio.timeout(60):
        entered = await asyncio.gather(*(enter(instance) for instance in instances for _ in range(20)))
    assert sum(entered) == 1
    assert all(0 < wait <= 1 for wait in waits)


async def test_a_successful_probe_closes_the_breaker_for_all_instances(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    async with instances[1].inside(make_breaker()):
        assert await is_refused(instances[2], make_breaker())
    for instance in instances:
        await soon(lambda instance=instance: instance.use(make_breaker()))  # type: ignore[misc]
    assert await instances.row("open_until, openings, probe_instance") == (None, 0, None)


async def close_by_hand(instances: BreakerInstances) -> bool:
    async with instances.here.database.autocommit() as connection:
        return await breaker_admin.close(connection, instances.here.database.namespace, NAME, by="a test")


async def test_a_breaker_that_is_closed_by_hand_is_closed_for_all_instances(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the notification: otherwise the instances would use the state that they have read for an hour."""
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 3600.0)
    given = make_breaker(rest="1h")
    await instances[0].use(given, DownError())
    for instance in instances:
        await soon(lambda instance=instance: is_refused(instance, given))  # type: ignore[misc]
    assert await close_by_hand(instances)
    for instance in instances:
        await soon(lambda instance=instance: instance.use(given))  # type: ignore[misc]
    assert await instances.row("open_until, openings, failed_at") == (None, 0, [])
    assert not await close_by_hand(instances), "it is closed already"


async def test_the_result_of_a_probe_that_runs_while_the_breaker_is_closed_by_hand_changes_nothing(
    instances: BreakerInstances,
) -> None:
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    with suppress(DownError):
        async with instances[0].breakers.guard(make_breaker()):
            assert await instances.row("probe_instance") == (instances[0].identity.id,)
            assert await close_by_hand(instances)
            closed = await instances.row("token, open_until, probe_instance, probe_until")
            assert closed[1:] == (None, None, None)
            raise DownError
    assert await instances.row("token, open_until, probe_instance, probe_until") == closed


async def test_a_failed_probe_opens_the_breaker_again_for_twice_as_long(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    for longer in (2, 4):
        await instances.end_rest()
        await instances[1].use(make_breaker(), DownError())
        with pytest.raises(BreakerOpen) as again:
            async with instances[2].breakers.guard(make_breaker()):
                pytest.fail("the block was entered")
        assert 60 * longer - 10 < again.value.retry_after <= 60 * longer


async def test_after_a_cancelled_probe_the_next_block_may_probe(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    with pytest.raises(asyncio.CancelledError):
        async with instances[0].breakers.guard(make_breaker()):
            raise asyncio.CancelledError
    assert await soon(lambda: instances[1].use(make_breaker()))
    assert await instances.row("open_until") == (None,)


async def test_the_next_block_may_probe_if_a_caller_is_cancelled_while_it_enters_as_probe(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row has the probe already, and the response is still in flight."""
    written, answered = asyncio.Event(), asyncio.Event()
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    fetch = instances[0].breakers._fetch

    async def answer_late(statement: Statement, *given: Any, **more: Any) -> Any:
        answer = await fetch(statement, *given, **more)
        if statement is ENTER_AS_PROBE:
            written.set()
            await answered.wait()
        return answer

    monkeypatch.setattr(instances[0].breakers, "_fetch", answer_late)
    impatient = asyncio.create_task(instances[0].use(make_breaker()))
    await written.wait()
    impatient.cancel()
    await asyncio.wait([impatient])
    answered.set()
    assert await soon(lambda: instances[1].use(make_breaker()))
    assert await instances.row("open_until") == (None,)


@pytest.mark.parametrize("error", [None, asyncio.CancelledError()], ids=["succeeded", "was cancelled"])
async def test_the_result_of_a_probe_is_written_when_the_database_is_back(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch, error: BaseException | None
) -> None:
    failures: list[str] = []
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    fetch = instances[0].breakers._fetch

    async def fail_twice(statement: Statement, *given: Any, **more: Any) -> Any:
        if statement in {PROBE_SUCCEEDED, PROBE_ABANDONED} and len(failures) < 2:
            failures.append(statement)
            raise psycopg.OperationalError("the database is away")
        return await fetch(statement, *given, **more)

    monkeypatch.setattr(instances[0].breakers, "_fetch", fail_twice)
    with suppress(asyncio.CancelledError):
        await instances[0].use(make_breaker(), error)

    async def no_probe() -> bool:
        return await instances.row("probe_instance") == (None,)

    await soon(no_probe)
    assert len(failures) == 2


async def test_the_next_block_may_probe_when_the_instance_of_the_probe_is_gone(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    await instances.end_rest()
    async with instances[0].inside(make_breaker()):
        assert await is_refused(instances[1], make_breaker())
        await instances.here.sql("UPDATE instances SET state = 'gone' WHERE id = %s", instances[0].identity.id)
        instances[1].relink()
        assert await instances[1].use(make_breaker())


async def test_after_the_timeout_of_a_probe_another_may_begin_and_the_late_result_is_ignored(
    instances: BreakerInstances,
) -> None:
    short = make_breaker(probe_timeout="100ms")
    await instances[0].use(short, DownError())
    await instances.end_rest()
    async with AsyncExitStack() as first:
        await first.enter_async_context(instances[0].inside(short))
        await asyncio.sleep(0.15)
        async with instances[1].inside(make_breaker()):
            second = await instances.row("token, open_until, probe_instance, probe_until")
            # The first probe succeeds.
            await first.aclose()
            assert await instances.row("token, open_until, probe_instance, probe_until") == second
            assert await is_refused(instances[2], make_breaker())


async def test_the_token_of_a_breaker_only_grows(instances: BreakerInstances) -> None:
    tokens = list[int]()
    for _ in range(3):
        await instances[0].use(make_breaker(), DownError())
        tokens += await instances.row("token")
        await instances.end_rest()
        await instances[0].use(make_breaker())
        tokens += await instances.row("token")
    assert tokens == sorted(set(tokens))


# -- the states of an instance ----------------------------------------------------------------------------------------


async def test_a_closed_breaker_is_read_once_for_very_many_uses(instances: BreakerInstances) -> None:
    await asyncio.gather(*(instances[0].use(make_breaker()) for _ in range(100)))
    for _ in range(100):
        await instances[0].use(make_breaker())
    assert instances[0].statements == 1


async def test_refusals_by_an_open_breaker_need_hardly_any_statement(instances: BreakerInstances) -> None:
    await instances[0].use(make_breaker(), DownError())
    await soon(lambda: is_refused(instances[1], make_breaker()))
    before, began = instances[1].statements, clock()
    for _ in range(100):
        assert await is_refused(instances[1], make_breaker())
    # More than one or two only if all refusals together take longer than a state is used.
    assert instances[1].statements - before <= 2 + (clock() - began) / breakers.STATE_LIFETIME


async def test_an_instance_without_the_notification_reads_the_opening_when_its_block_fails(
    instances: BreakerInstances,
) -> None:
    await instances[1].use(make_breaker())
    instances[1].ignores_notifications = True
    await instances[0].use(make_breaker(), DownError())
    assert await instances[1].use(make_breaker(), DownError())
    assert await is_refused(instances[1], make_breaker())


async def test_instances_read_a_state_with_failures_again_without_a_notification(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    given = make_breaker(failures=2)
    await instances[0].use(given, DownError())
    await instances[1].use(given)
    instances[1].ignores_notifications = True
    await instances[0].use(given, DownError())
    await soon(lambda: is_refused(instances[1], given))


async def test_without_its_link_an_instance_does_not_rely_on_notifications(
    instances: BreakerInstances, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    await instances[1].use(make_breaker())
    instances[1].ignores_notifications = True
    instances[1].linked = False
    await instances[0].use(make_breaker(), DownError())
    await soon(lambda: is_refused(instances[1], make_breaker()))


async def test_all_states_in_memory_are_invalid_after_the_link_was_lost(instances: BreakerInstances) -> None:
    await instances[1].use(make_breaker())
    instances[1].ignores_notifications = True
    await instances[0].use(make_breaker(), DownError())
    assert await instances[1].use(make_breaker())
    instances[1].relink()
    assert await is_refused(instances[1], make_breaker())


async def test_a_response_that_is_older_than_a_notification_is_not_kept(instances: BreakerInstances) -> None:
    """The state is read before the breaker opens, and its response arrives after the notification."""
    slow, fetch = asyncio.Event(), instances[1].breakers._fetch

    async def slowly(*given: Any, **more: Any) -> Any:
        rows = await fetch(*given, **more)
        await slow.wait()
        return rows

    instances[1].breakers._fetch = slowly  # type: ignore[method-assign]
    using = asyncio.create_task(instances[1].use(make_breaker()))
    await soon(lambda: has_sent_a_statement(instances[1]))
    await instances[0].use(make_breaker(), DownError())
    await soon(lambda: has_invalidated_states(instances[1]))
    slow.set()
    await using
    assert await is_refused(instances[1], make_breaker())


async def has_sent_a_statement(instance: BreakerInstance) -> bool:
    return instance.statements == 1


async def has_invalidated_states(instance: BreakerInstance) -> bool:
    return instance.breakers._invalidations > 0


async def test_during_an_outage_the_last_state_applies_and_an_unknown_breaker_is_closed(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(breakers, "STATE_LIFETIME", 0.1)
    port = int(address.rpartition("/")[0].rpartition(":")[2])
    with Proxy(("127.0.0.1", port)) as proxy:
        async with start_instances(2, address.replace(f":{port}/", f":{proxy.port}/"), address) as instances:
            await instances[0].use(make_breaker(), DownError())
            assert await is_refused(instances[0], make_breaker())
            proxy.refuse()
            proxy.cut()
            instances[0].linked = instances[1].linked = False
            await asyncio.sleep(0.2)
            assert await is_refused(instances[0], make_breaker())
            assert await instances[1].use(make_breaker())
            assert await instances[1].use(make_breaker(), DownError())
            proxy.heal()
            await soon(lambda: is_refused(instances[1], make_breaker()))


# -- the arguments ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
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
def test_invalid_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    given = {"name": NAME, "failures": 5, "within": "60s", "rest": "30s", "probe_timeout": "60s"}
    with pytest.raises(BreakerInvalid, match=message):
        Breaker.of(**{**given, **wrong})


def test_a_breaker_outside_of_a_running_service_raises() -> None:
    with pytest.raises(FleetError, match="in the code of a running service"):
        breaker(NAME)


async def test_a_refused_route_answers_503_with_retry_after_on_every_instance(address: str) -> None:
    async with service(address) as one, service(address) as other:
        assert (await other.client.get("/trial/guarded", params={"fails": False})).status_code == 200
        assert (await one.client.get("/trial/guarded", params={"fails": True})).status_code == 502

        async def is_open_at_the_other() -> bool:
            return (await other.client.get("/trial/guarded", params={"fails": False})).status_code == 503

        await soon(is_open_at_the_other)
        answer = await other.client.get("/trial/guarded", params={"fails": False})
        assert answer.json()["type"] == "/problems/upstream-unavailable"
        assert 3500 < int(answer.headers["Retry-After"]) <= 3600
        text = (await other.client.get("/metrics")).text
        assert 'flotilla_breaker_open{name="trial"} 1.0' in text
        assert 'flotilla_breaker_opened_total{name="trial"} 1.0' in (await one.client.get("/metrics")).text
