"""Resources in routes, actions, plain functions and singletons, each of its own instance; and the guide about them."""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from fastapi import APIRouter

from app import routes, startup
from app.fleet import HeldLock, Provided, Run, action, provided, resource, singleton
from app.fleet.errors import ResourceInvalid
from app.fleet.testing import fixtures
from app.settings import Settings
from tests.integration.test_edge import is_problem
from tests.support.guides import import_program, program
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.service import service

pytestmark = pytest.mark.anyio
HERE = "tests.integration.test_resources"


class Flag:
    """The resource of these tests: it knows whose it is."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.seen: list[str] = []


@resource
async def flag(settings: Settings) -> AsyncIterator[Flag]:
    yield Flag(settings.namespace)


@action("see-flag")
async def see_flag(_: Run) -> dict[str, str]:
    return {"owner": provided(Flag).owner, "namespace": provided(Settings).namespace}


@action("see-flag-in-thread")
def see_flag_in_thread(_: Run) -> dict[str, str]:
    return {"owner": provided(Flag).owner}


@singleton("flag-watch")
async def flag_watch(held: HeldLock) -> None:
    provided(Flag).seen.append("singleton")
    await held.lost.wait()


router = APIRouter()


@router.get("/flag")
async def show_flag(flag: Provided[Flag]) -> str:
    return flag.owner


@router.get("/flag/plain")
def show_flag_plainly(flag: Provided[Flag]) -> str:
    return f"{flag.owner} {provided(Flag).owner}"


@router.get("/nothing")
async def show_nothing(nothing: Provided[threading.Thread]) -> None:
    raise AssertionError(nothing)


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "flag", flag, raising=False)
    own = APIRouter()
    own.include_router(router)
    monkeypatch.setattr(routes, "public", own)


@pytest.mark.usefixtures("declared")
async def test_each_instance_of_a_process_finds_its_own_resources_wherever_its_code_runs(address: str) -> None:
    async with (
        local_instance(address, actions=(HERE,), namespace="north", migrate_on_start=True) as north,
        local_instance(address, actions=(HERE,), namespace="south", migrate_on_start=True) as south,
    ):
        for name, here in (("north", north), ("south", south)):
            assert (await here.run("see-flag")).result == {"owner": name, "namespace": name}
            assert (await here.run("see-flag-in-thread")).result == {"owner": name}
            assert (await here.running.client.get("/flag")).json() == name
            assert (await here.running.client.get("/flag/plain")).json() == f"{name} {name}"

            async def seen(here: LocalInstance = here) -> list[str]:
                found: list[str] = here.running.context.resources.find(Flag).seen
                return found

            assert await soon(seen) == ["singleton"]


@pytest.mark.usefixtures("declared")
async def test_a_route_that_needs_an_unknown_type_fails_with_the_reason_in_the_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(address) as running:
        is_problem(await running.client.get("/nothing"), "internal")
    (record,) = [each for each in caplog.records if each.message == "request.failed"]
    assert record.exc_info is not None
    assert "no resource of the type Thread is open" in str(record.exc_info[1])


# -- docs/guides/your-own.md ------------------------------------------------------------------------------------------


class Upstream(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"rate": 1.25 if self.path == "/EUR" else 7}).encode()
        self.send_response(404 if self.path == "/none" else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def upstream() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.template
async def test_the_resources_of_the_guide_are_found_in_its_action_and_its_route(
    address: str, upstream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = import_program(monkeypatch, "your-own", "class Settings(FleetSettings)")
    own = import_program(monkeypatch, "your-own", "class Rates:")
    import_program(monkeypatch, "your-own", '@action("read-rate"')
    route = import_program(monkeypatch, "your-own", '@router.get("/rates/{code}")')
    monkeypatch.setattr(routes, "public", route.router)
    given = {"actions": ("app.actions.rates",), "rates_url": upstream}
    async with service(address, settings.Settings, **given) as running:
        here = LocalInstance(running)
        assert (await here.run("read-rate", {"code": "EUR"})).result == 1.25
        assert (await running.client.get("/rates/JPY")).json() == 7
        is_problem(await running.client.get("/rates/none"), "unavailable")
        client = running.context.resources.find(httpx.AsyncClient)
    assert client.is_closed

    # As its test replaces a resource.
    class Fixed(own.Rates):  # type: ignore[misc, name-defined]
        def __init__(self) -> None: ...

        async def of(self, _: str) -> float:
            return 3.5

    names: dict[str, Any] = {"resource": resource, "AsyncIterator": AsyncIterator, "pytest": pytest, "Any": Any}
    names |= {"Rates": own.Rates, "FixedRates": Fixed}
    exec(program("your-own", "python", "fixed_rates()"), names)  # noqa: S102
    fixtures.replace_resources(monkeypatch, names["instance_resources"]._get_wrapped_function()())
    async with service(address, settings.Settings, **given) as running:
        assert (await running.client.get("/rates/JPY")).json() == 3.5


@pytest.mark.template
async def test_the_loop_of_the_guide_runs_while_its_instance_does(
    address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = import_program(monkeypatch, "your-own", "class Ticker:")
    async with service(address) as running:
        ticker = running.context.resources.find(own.Ticker)

        async def ticks() -> bool:
            return bool(ticker.ticks >= 3)

        await soon(ticks)
    ended = ticker.ticks
    assert not [each for each in caplog.records if each.message == "resource.failed"]
    assert ticker.ticks == ended


def test_a_resource_that_replaces_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    @resource
    async def lighthouse() -> AsyncIterator[bytearray]:
        yield bytearray()

    with pytest.raises(ResourceInvalid, match=r"lighthouse replaces no resource: .* of the type bytearray"):
        fixtures.replace_resources(monkeypatch, [lighthouse])
