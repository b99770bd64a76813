"""Resources: how they are declared, opened, found and closed."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NewType

import pytest

from app.fleet.errors import FleetError, ResourceFailed, ResourceInvalid, ResourceUnknown
from app.fleet.resources import resources as module
from app.fleet.resources.resource import Resource, resource
from app.fleet.resources.resources import Resources, provided
from app.fleet.settings import FleetSettings
from app.settings import Settings

pytestmark = pytest.mark.anyio

SETTINGS = Settings.load()


class Base:
    pass


class First(Base):
    pass


class Second(Base):
    pass


class Third:
    pass


happened: list[str] = []


@pytest.fixture(autouse=True)
def nothing_happened() -> None:
    happened.clear()


@resource
async def first() -> AsyncIterator[First]:
    happened.append("first opened")
    yield First()
    happened.append("first closed")


@resource
async def second(before: First, settings: Settings, size: int = 3) -> AsyncIterator[Second]:
    assert isinstance(before, First)
    assert (settings, size) == (SETTINGS, 3)
    happened.append("second opened")
    yield Second()
    happened.append("second closed")


@resource
async def third(before: Second) -> AsyncIterator[Third]:
    assert isinstance(before, Second)
    happened.append("third opened")
    yield Third()
    happened.append("third closed")


def failed(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    fields = [record.fields for record in caplog.records if record.message == "resource.failed"]  # type: ignore[attr-defined]
    return [(each["resource"].rpartition(".")[2], each["during"]) for each in fields]


async def opened(*declared: Resource[Any]) -> Resources:
    resources = Resources(SETTINGS, declared)
    resources.enter()
    await resources.start()
    return resources


async def test_resources_are_opened_in_the_order_of_their_declaration_and_closed_in_reverse() -> None:
    resources = await opened(first, second, third)
    assert happened == ["first opened", "second opened", "third opened"]
    await resources.stop()
    assert happened[3:] == ["third closed", "second closed", "first closed"]


async def test_a_value_is_found_by_its_type_and_by_a_base_of_its_type() -> None:
    resources = await opened(first, third_alone)
    assert isinstance(provided(First), First)
    assert provided(Base) is provided(First)
    assert provided(Settings) is provided(FleetSettings) is SETTINGS
    await resources.stop()
    with pytest.raises(ResourceUnknown, match="no resource of the type First is open"):
        provided(First)


@resource
async def third_alone() -> AsyncIterator[Third]:
    yield Third()


async def test_the_error_for_an_unknown_type_names_the_file_and_what_there_is() -> None:
    await opened(first)
    with pytest.raises(ResourceUnknown, match=r"type Third .* app/startup\.py; there is Settings, First"):
        provided(Third)


async def test_a_base_of_several_types_is_refused() -> None:
    await opened(first, second)
    with pytest.raises(ResourceUnknown, match=r"several resources are a Base \(First, Second\)"):
        provided(Base)


def test_outside_of_a_running_service_nothing_is_provided() -> None:
    with pytest.raises(FleetError, match="only available in the code of a running service"):
        provided(Settings)


def refuse(text: str) -> None:
    raise SystemExit(text)


async def test_a_resource_that_raises_refuses_the_start_and_those_before_it_are_closed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @resource
    async def broken(before: Second) -> AsyncIterator[Third]:
        refuse(f"no {type(before).__name__}")
        yield Third()

    resources = Resources(SETTINGS, [first, second, broken])
    with pytest.raises(ResourceFailed, match=r"test_resources\.broken could not be opened: SystemExit: no Second"):
        await resources.start()
    await resources.stop()
    assert happened[2:] == ["second closed", "first closed"]
    assert failed(caplog) == [("broken", "opening")]


async def test_a_resource_that_does_not_open_in_time_refuses_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    @resource
    async def slow() -> AsyncIterator[Third]:
        try:
            await asyncio.sleep(3600)
        finally:
            happened.append("cancelled")
        yield Third()

    monkeypatch.setattr(module, "OPEN_TIMEOUT", 0.05)
    resources = Resources(SETTINGS, [first, slow])
    with pytest.raises(ResourceFailed, match=r"test_resources\.slow was not open after 0\.05 s"):
        await resources.start()
    await resources.stop()
    assert happened == ["first opened", "cancelled", "first closed"]


async def ends_late() -> None:
    await asyncio.sleep(3600)


async def ignores_its_cancellation() -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until and "released" not in happened:
        try:
            await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            happened.append("ignored")


async def raises() -> None:
    raise RuntimeError("the tap is stuck")


@pytest.mark.parametrize("end", [ends_late, ignores_its_cancellation, raises])
async def test_a_resource_that_cannot_be_closed_does_not_keep_the_others_open(
    end: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @resource
    async def stuck(before: First) -> AsyncIterator[Third]:
        assert isinstance(before, First)
        yield Third()
        await end()

    monkeypatch.setattr(module, "CLOSE_TIMEOUT", 0.4)
    monkeypatch.setattr(module, "CANCEL_TIMEOUT", 0.05)
    resources = await opened(first, stuck)
    began = time.monotonic()
    await resources.stop()
    # Far less than what it would take, and far more than the limit: the machine may be busy.
    assert time.monotonic() - began < 10
    assert happened[-1] == "first closed"
    assert failed(caplog) == [("stuck", "closing")]
    happened.append("released")
    # The task that was left behind ends before the loop of this test does.
    await asyncio.sleep(0.05)


async def test_a_resource_is_closed_by_the_task_that_opened_it() -> None:
    """Task groups, timeouts and cancel scopes must be left by the task that has entered them."""

    @resource
    async def loop() -> AsyncIterator[asyncio.Event]:
        event = asyncio.Event()
        async with asyncio.timeout(3600), asyncio.TaskGroup() as tasks:
            task = tasks.create_task(event.wait())
            yield event
            task.cancel()
            happened.append("left")

    resources = await opened(loop)
    assert not provided(asyncio.Event).is_set()
    await asyncio.create_task(resources.stop())
    assert happened == ["left"]


async def test_a_task_of_a_resource_that_raises_is_logged_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @resource
    async def loop() -> AsyncIterator[Third]:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(raises())
            yield Third()

    resources = await opened(first, loop)
    while not failed(caplog):  # noqa: ASYNC110 — a log line sets no event
        await asyncio.sleep(0.01)
    assert failed(caplog) == [("loop", "use")]
    assert isinstance(provided(First), First)
    await resources.stop()
    assert happened == ["first opened", "first closed"]


def test_two_resources_of_one_type_are_refused_unless_one_has_a_type_of_its_own() -> None:
    @resource
    async def other() -> AsyncIterator[First]:
        yield First()

    with pytest.raises(ResourceInvalid, match=r"two resources are of the type First: .*\.first and .*\.other"):
        Resources(SETTINGS, [first, other])
    with pytest.raises(ResourceInvalid, match="two resources are of the type Settings: the settings and"):
        Resources(SETTINGS, [own_settings])
    Resources(SETTINGS, [first, archive])


Archive = NewType("Archive", First)


@resource
async def archive() -> AsyncIterator[Archive]:
    yield Archive(First())


@resource
async def own_settings() -> AsyncIterator[Settings]:
    yield SETTINGS


def test_a_resource_that_needs_what_is_declared_later_is_refused() -> None:
    with pytest.raises(ResourceInvalid, match=r"second needs First \(its parameter 'before'\)"):
        Resources(SETTINGS, [second, first])


async def no_generator() -> First:
    return First()


async def without_annotation():  # type: ignore[no-untyped-def]
    yield First()


async def without_type(before) -> AsyncIterator[First]:  # type: ignore[no-untyped-def]
    yield before


async def wrongly_annotated() -> First:  # type: ignore[misc]
    yield First()


async def with_a_name_that_does_not_exist() -> "AsyncIterator[Nowhere]":  # type: ignore[name-defined]  # noqa: F821
    yield First()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (no_generator, "must be `async def` and have one `yield`"),
        (without_annotation, "annotate what it yields"),
        (wrongly_annotated, "annotate what it yields"),
        (without_type, "the parameter 'before' needs an annotation"),
        (with_a_name_that_does_not_exist, "name 'Nowhere' is not defined"),
    ],
)
def test_a_wrong_declaration_is_refused_with_the_place_and_the_reason(function: Any, why: str) -> None:
    with pytest.raises(ResourceInvalid, match=f"{function.__name__} is declared wrongly: .*{why}"):
        resource(function)
