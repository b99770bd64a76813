"""All services have the same contract of `start` and `stop`, in any order of calls."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from typing import cast

import pytest

from app.fleet.background import LoopService, Service, cancel_and_wait, wait_for_event
from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db import dsn, migrations
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Database
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.engine import Engine
from app.fleet.lifecycle import Lifecycle
from app.fleet.resources.resource import resource
from app.fleet.resources.resources import Resources
from app.fleet.stream.stream import Stream
from app.settings import Settings
from tests.support.runs import soon
from tests.support.trial_singletons import beacon

pytestmark = pytest.mark.anyio
KINDS = [
    "pool",
    "member",
    "locks",
    "limits",
    "breakers",
    "singletons",
    "resources",
    "anomalies",
    "relay",
    "hub",
    "executor",
    "dispatcher",
    "reconciler",
    "pruner",
    "minutes",
    "scheduler",
]


@resource
async def lighthouse(settings: Settings) -> AsyncIterator[str]:
    yield settings.namespace


@pytest.fixture
async def make(address: str) -> AsyncIterator[Callable[[str], Service]]:
    """Return a function that creates a new service of the given kind."""
    settings = Settings.load(database_url=address)
    addresses = dsn.resolve(settings)
    namespace = Namespace(settings.namespace)
    await asyncio.to_thread(migrations.migrate, addresses.direct, namespace)
    shared = Database(settings, addresses, namespace)
    await shared.start()

    def engine() -> Engine:
        member = Member(settings, addresses, namespace, shared, version="test", on_leave=print)
        catalogue = Catalogue.load(["tests.support.trial_actions"])
        return Engine(
            settings, shared, member, catalogue, Lifecycle(), Stream(shared, member), Coordination(shared, member)
        )

    def stream() -> Stream:
        return Stream(shared, Member(settings, addresses, namespace, shared, version="test", on_leave=print))

    def coordination() -> Coordination:
        made = Coordination(shared, Member(settings, addresses, namespace, shared, version="test", on_leave=print))
        made.singletons.declare([beacon])
        return made

    def build(kind: str) -> Service:
        match kind:
            case "pool":
                return Database(settings, addresses, namespace)
            case "member":
                return Member(settings, addresses, namespace, shared, version="test", on_leave=print)
            case "resources":
                return Resources(settings, [lighthouse])
            case "relay" | "hub":
                return cast("Service", getattr(stream(), kind))
            case "locks" | "limits" | "breakers" | "singletons" | "anomalies":
                return cast("Service", getattr(coordination(), kind))
            case _:
                return cast("Service", getattr(engine(), kind))

    yield build
    await shared.stop()


def test_the_tests_cover_all_services() -> None:
    services = {*Service.__subclasses__(), *LoopService.__subclasses__()} - {LoopService}
    assert sorted(each.name for each in services) == sorted(KINDS)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_that_was_stopped_before_its_start_never_starts(
    make: Callable[[str], Service], kind: str
) -> None:
    service = make(kind)
    await service.stop()
    await service.start()
    assert not service.running


@pytest.mark.parametrize("kind", KINDS)
async def test_starting_and_stopping_a_service_twice_has_no_further_effect(
    make: Callable[[str], Service], kind: str
) -> None:
    service = make(kind)
    await service.start()
    await service.start()
    assert service.running
    await service.stop()
    await service.stop()
    assert not service.running


@pytest.mark.parametrize("kind", KINDS)
async def test_concurrent_starts_and_stops_leave_no_task_or_thread_behind(
    make: Callable[[str], Service], kind: str
) -> None:
    tasks, threads = len(asyncio.all_tasks()), {each.name for each in threading.enumerate()}
    for _ in range(5):
        service = make(kind)
        storm = [service.start, service.stop, service.start, service.stop, service.start]
        await asyncio.gather(*(call() for call in storm))
        await service.stop()
        assert not service.running

    async def nothing_is_left() -> bool:
        left = {each.name for each in threading.enumerate() if not each.name.startswith("asyncio")} - threads
        return not left and len(asyncio.all_tasks()) <= tasks

    await soon(nothing_is_left)


async def test_a_service_whose_start_failed_can_be_stopped(address: str) -> None:
    settings = Settings.load(database_url=address)
    addresses, namespace = dsn.resolve(settings), Namespace("never-migrated")
    database = Database(settings, addresses, namespace)
    await database.start()
    member = Member(settings, addresses, namespace, database, version="test", on_leave=print)
    with pytest.raises(Exception, match="instance_ids"):
        await member.start()
    await member.stop()
    await database.stop()


async def test_a_loop_that_is_cancelled_at_the_moment_of_its_event_ends() -> None:
    """The event and the cancellation are up to five iterations of the event loop apart."""
    for turns in range(6):
        event, rounds = asyncio.Event(), list[int]()

        async def loop(event: asyncio.Event = event, rounds: list[int] = rounds) -> None:
            while True:
                await wait_for_event(event, 60)
                event.clear()
                rounds.append(1)

        task = asyncio.create_task(loop())
        for _ in range(3):
            await asyncio.sleep(0)
        event.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled(), f"after {turns} turns"


async def test_a_task_that_loses_a_cancellation_is_cancelled_again() -> None:
    lost = []

    async def loses_the_first() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lost.append(1)
        await asyncio.sleep(60)

    task = asyncio.create_task(loses_the_first())
    await asyncio.sleep(0)
    async with asyncio.timeout(60):
        await cancel_and_wait(task)
    assert lost == [1]
    assert task.cancelled()


async def test_cancel_and_wait_does_not_raise_the_exception_of_the_task() -> None:
    async def raises() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("while it ended")

    task = asyncio.create_task(raises())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert isinstance(task.exception(), ValueError)
