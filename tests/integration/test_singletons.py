"""Singletons: the instance that has the lock runs the function, and however that ends, an instance runs it again."""

import asyncio
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest

from app.fleet import HeldLock, singleton
from app.fleet.coordination import singletons
from app.fleet.coordination.singletons import Singletons
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.errors import ActionInvalid
from tests.support import trial_singletons
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(singletons, "PAUSE", 0.01)


def service_of(instance: LocalInstance, *declared: Any) -> Singletons:
    made = Singletons(instance.running.context.coordination.locks)
    made.declare(declared)
    return made


async def test_singletons_are_found_in_the_modules_of_actions() -> None:
    assert Catalogue.load(["tests.support.trial_singletons"]).singletons == [trial_singletons.beacon]


async def test_a_singleton_that_returns_or_raises_is_started_again(address: str) -> None:
    tokens: list[int] = []

    @singleton("restless")
    async def restless(turn: HeldLock) -> None:
        tokens.append(turn.token)
        if len(tokens) == 2:
            raise ValueError("the second time it fails")

    async with local_instance(address) as here:
        service = service_of(here, restless)
        await service.start()

        async def enough() -> bool:
            return len(tokens) >= 4

        await soon(enough)
        await service.stop()
        assert tokens == sorted(set(tokens))
        assert await here.sql("SELECT instance_id FROM service_locks") == [(None,)]


async def test_a_singleton_that_ignores_its_cancellation_does_not_delay_a_shutdown(address: str) -> None:
    begun = asyncio.Event()

    @singleton("deaf")
    async def uncancellable(_: HeldLock) -> None:
        begun.set()
        for _times in range(2):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue

    async with local_instance(address) as here:
        service = service_of(here, uncancellable)
        await service.start()
        await asyncio.wait_for(begun.wait(), 60)
        await asyncio.wait_for(service.stop(), 60)
        (task,) = service._tasks.values()
        assert not task.done()
        assert task not in asyncio.all_tasks(), "the end of the process would wait for it"
        task.cancel()
        await asyncio.wait_for(asyncio.wait([task]), 60)


async def test_a_singleton_that_returns_after_its_cancellation_is_not_started_again(address: str) -> None:
    tokens: list[int] = []

    @singleton("polite")
    async def polite(turn: HeldLock) -> None:
        tokens.append(turn.token)
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

    async with local_instance(address) as here:
        service = service_of(here, polite)
        await service.start()

        async def begun() -> bool:
            return bool(tokens)

        await soon(begun)
        (task,) = service._tasks.values()
        await service.stop()
        await asyncio.wait_for(asyncio.wait([task]), 60)
        assert tokens == [1]
        assert await here.sql("SELECT instance_id FROM service_locks") == [(None,)]


async def test_a_singleton_runs_on_one_of_two_instances_and_moves_when_that_one_stops(address: str) -> None:
    running: list[str] = []

    @singleton("one-of-two")
    async def one_of_two(turn: HeldLock) -> None:
        running.append(turn.owner.name)
        try:
            await asyncio.sleep(3600)
        finally:
            running.remove(turn.owner.name)

    async with local_instance(address) as first, local_instance(address) as second:
        services = [service_of(each, one_of_two) for each in (first, second)]
        for service in services:
            await service.start()

        async def is_running() -> bool:
            return bool(running)

        await soon(is_running)
        assert len(running) == 1
        (owner,) = running
        names = [each.running.context.member.identity.name for each in (first, second)]  # type: ignore[union-attr]
        await services[names.index(owner)].stop()
        await soon(is_running)
        assert running == [name for name in names if name != owner]
        for service in services:
            await service.stop()
        assert running == []


def test_two_singletons_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @singleton("beacon")
    async def other(_: HeldLock) -> None: ...

    module = ModuleType("lighthouse")
    module.beacon = trial_singletons.beacon  # type: ignore[attr-defined]
    module.other = other  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, "lighthouse", module)
    with pytest.raises(ActionInvalid, match="two singletons are called 'beacon'"):
        Catalogue.load(["lighthouse"])


def test_an_invalid_singleton_is_refused() -> None:
    async def fine(_: HeldLock) -> None: ...

    def plain(_: HeldLock) -> None: ...

    async def without_a_turn() -> None: ...

    with pytest.raises(ActionInvalid, match=r"'Not A Name' .* a name is a lower-case letter"):
        singleton("Not A Name")(fine)
    for wrong in (plain, without_a_turn):
        with pytest.raises(ActionInvalid, match="it must be an async function of the lock"):
            singleton("x")(wrong)  # type: ignore[arg-type]


async def test_calling_a_singleton_calls_its_function() -> None:
    seen: list[HeldLock] = []

    @singleton("x")
    async def x(turn: HeldLock) -> None:
        seen.append(turn)

    turn = HeldLock(None, None, "x", 1, 5.0, 0.0)  # type: ignore[arg-type]
    await x(turn)
    assert seen == [turn]
