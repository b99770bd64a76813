"""In a deploy, the runs that an instance returns go to an instance of another release first."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, NamedTuple

import pytest

from app.fleet.engine import engine
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.maintenance import reconciler
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = pytest.mark.anyio

RUNS = 8


class Deploy(NamedTuple):
    """The leaving instance has all runs; the staying one is of the same release, and the leader."""

    leaving: AsyncExitStack
    staying: LocalInstance
    other: LocalInstance
    runs: list[int]

    async def instances_of_runs(self) -> set[str | None]:
        """End the leaving instance, wait until all runs have begun elsewhere, and return where."""
        left = await self.staying.read(self.runs[0])
        await self.leaving.aclose()

        async def all_began() -> set[str | None] | None:
            found = [await self.staying.read(run_id) for run_id in self.runs]
            began = all(run.state == "running" and run.instance != left.instance for run in found)
            return {run.instance for run in found} if began else None

        return await soon(all_began)


def name_of(instance: LocalInstance) -> str:
    identity = instance.running.context.member.identity
    assert identity is not None
    return identity.name


@pytest.fixture(autouse=True)
def no_reading_at_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reconciler would find the runs at any moment. It still reads whenever another instance becomes ready."""
    monkeypatch.setattr(reconciler, "INTERVAL", 3600.0)


@asynccontextmanager
async def deploying(address: str, **other: Any) -> AsyncIterator[Deploy]:
    leaving = AsyncExitStack()
    async with (
        local_instance(address, version="one") as staying,
        local_instance(address, **other) as another,
        leaving,
    ):
        # Half of this time is for writing: what is not written by then is not returned, but rescued.
        leaver = await leaving.enter_async_context(local_instance(address, version="one", pause_timeout=6.0))
        for each in (staying, another):
            each.engine.dispatcher.pause_claiming(True)
        runs = await staying.trigger_all([Order("nap", {"seconds": 3600})] * RUNS)
        for run_id in runs:
            await leaver.attempt(run_id)
        for each in (staying, another):
            each.engine.dispatcher.pause_claiming(False)
        yield Deploy(leaving, staying, another, runs)


async def test_returned_runs_go_to_an_instance_of_another_release(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RELEASE_DELAY", 3600.0)
    async with deploying(address, version="two") as deploy:

        async def is_known() -> bool:
            return deploy.staying.engine.reconciler.another_release

        await soon(is_known)
        assert await deploy.instances_of_runs() == {name_of(deploy.other)}
        run = await deploy.staying.read(deploy.runs[0])
        assert run.attempt == 1, "a pause does not count as an attempt"


async def test_after_a_delay_any_instance_claims_the_returned_runs(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "RELEASE_DELAY", 0.05)
    async with deploying(address, version="two") as deploy:
        deploy.other.engine.dispatcher.pause_claiming(True)
        assert await deploy.instances_of_runs() == {name_of(deploy.staying)}


@pytest.mark.parametrize("other", [{"version": "one"}, {"version": "two", "role": "web"}])
async def test_without_another_release_that_executes_runs_nobody_waits(
    address: str, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    monkeypatch.setattr(engine, "RELEASE_DELAY", 3600.0)
    async with deploying(address, **other) as deploy:
        assert await deploy.instances_of_runs() <= {name_of(deploy.staying), name_of(deploy.other)}
