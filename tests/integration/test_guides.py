"""The Python of the README and the guides does what the page says.

Each block is a module of one instance. What a block imports from your code, and the functions that it leaves out
(`fetch_notices`), are stand-ins made here.
"""

import importlib
import json
import sys
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx
import psycopg
import pytest
from fastapi import HTTPException
from prometheus_client import REGISTRY, generate_latest
from pydantic import BaseModel
from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import app
from app import models
from app.fleet import AlreadyActive, GiveUp, Run, action, transaction
from app.fleet.runs.read.records import RunRecord
from tests.support.fleet import ROOT
from tests.support.pages import blocks
from tests.support.runs import LocalInstance, local_instance, soon

pytestmark = [pytest.mark.anyio, pytest.mark.template]

GUIDES = ROOT / "docs" / "guides"
PACKAGE = "blocks_of_guides"


class Base(DeclarativeBase):
    """The tables of the README. They are not among the models of the service, whose migrations are checked."""

    metadata: ClassVar = MetaData()


class Order(Base):
    __tablename__ = "orders"

    id: Mapped[int] = mapped_column(primary_key=True)
    customer: Mapped[str]
    label: Mapped[str | None]


class Blocks:
    """The Python blocks of pages, as modules of a package."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._package = folder / PACKAGE
        self._package.mkdir()
        (self._package / "__init__.py").touch()
        self._patch = patch
        patch.syspath_prepend(folder)

    def add(self, page: Path, text: str, *, name: str, head: str = "") -> types.ModuleType:
        """Import the block of a page that contains this text; `head` is what the block leaves out."""
        (found,) = (block.text for block in blocks(page) if block.language == "python" and text in block.text)
        (self._package / f"{name}.py").write_text(head + found)
        return importlib.import_module(f"{PACKAGE}.{name}")

    def stand_in(self, module: str, **names: Any) -> types.ModuleType:
        """Let the blocks import these names from a module of the service."""
        made = types.ModuleType(module)
        vars(made).update(names)
        self._patch.setitem(sys.modules, module, made)
        return made


@pytest.fixture
def guides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Blocks]:
    yield Blocks(tmp_path, monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@asynccontextmanager
async def instance(address: str) -> AsyncIterator[LocalInstance]:
    async with local_instance(address, actions=(PACKAGE,)) as here:
        yield here


def create(address: str, table: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(f"CREATE TABLE {table}".encode())


def upstream(handler: Any) -> types.SimpleNamespace:
    """Return a stand-in for the module httpx, whose clients reach this handler."""
    return types.SimpleNamespace(AsyncClient=lambda: httpx.AsyncClient(transport=httpx.MockTransport(handler)))


async def test_the_actions_of_the_readme_ship_each_new_order_once(
    address: str, guides: Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels: list[str] = []

    async def create_label(order: int, idempotency_key: str) -> str:
        labels.append(idempotency_key)
        return f"label of {order}"

    async def new_orders() -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(id=number, customer="acme") for number in (1, 2)]

    shop = guides.stand_in("app.shop", create_label=create_label, new_orders=new_orders)
    monkeypatch.setattr(app, "shop", shop, raising=False)
    monkeypatch.setattr(models, "Order", Order, raising=False)
    create(address, "flotilla.orders (id bigint PRIMARY KEY, customer text, label text)")
    guides.add(ROOT / "README.md", '@action("ship-order"', name="readme")
    async with instance(address) as here:
        await here.sql("INSERT INTO orders VALUES (1, 'acme'), (2, 'acme')")
        for _ in range(2):
            await perform(here, "poll-orders")

        async def all_shipped() -> bool:
            return await here.sql("SELECT 1 FROM orders HAVING count(label) = 2") != []

        await soon(all_shipped)
        assert await here.sql("SELECT label FROM orders ORDER BY id") == [("label of 1",), ("label of 2",)]
        assert len(set(labels)) == len(labels) == 2


async def test_the_call_under_a_limit_and_a_breaker(address: str, guides: Blocks) -> None:
    module = guides.add(GUIDES / "limits-and-breakers.md", '@action("fetch-tides"', name="tides")
    vars(module)["httpx"] = upstream(lambda request: httpx.Response(200, json=dict(request.url.params)))
    async with instance(address) as here:
        run = await here.run("fetch-tides", {"port": "dover"})
        assert (run.state, run.result) == ("succeeded", {"port": "dover"})


async def test_an_action_whose_limit_is_reached_is_tried_again_later(address: str, guides: Blocks) -> None:
    guides.add(GUIDES / "limits-and-breakers.md", '@action("ask-pilot"', name="pilot")
    async with instance(address) as here:
        ids = [await here.trigger("ask-pilot") for _ in range(11)]

        async def one_waits() -> bool:
            found = [await here.read(run_id) for run_id in ids]
            return sorted((run.state, run.error is not None) for run in found) == [
                ("pending", True),
                *[("succeeded", False)] * 10,
            ]

        await soon(one_waits)


async def test_a_lock_around_a_guarded_transaction(address: str, guides: Blocks) -> None:
    page = GUIDES / "locks.md"
    (text,) = (block.text for block in blocks(page) if "async with lock(" in block.text)
    imports, body = text.split("\n\n", 1)
    effect = 'await session.execute(text("INSERT INTO public.books VALUES (:token)"), {"token": held.token})'
    indented = body.replace("...", effect).replace("\n", "\n    ")
    source = (
        f"{imports}\nfrom sqlalchemy import text\nfrom app.fleet import Run, action\n\n\n"
        f'@action("close")\nasync def close(run: Run) -> None:\n    {indented}\n'
    )
    (guides._package / "books.py").write_text(source)
    create(address, "public.books (token bigint)")
    async with instance(address) as here:
        assert (await here.run("close")).state == "succeeded"
        assert len(await here.sql("SELECT token FROM books")) == 1


async def test_a_singleton_runs(address: str, guides: Blocks) -> None:
    head = "import asyncio\n\nfrom app.fleet import HeldLock, singleton\n\n\n"
    guides.add(GUIDES / "locks.md", '@singleton("halts-monitor")', name="halts", head=head)
    async with instance(address) as here:

        async def held() -> bool:
            answer = await here.running.client.get("/locks")
            return "singleton:halts-monitor" in [each["name"] for each in answer.json()["items"]]

        await soon(held)


async def test_a_trigger_with_an_ordering_key(address: str, guides: Blocks) -> None:
    notified: list[tuple[str | None, Any]] = []

    @action("notify")
    async def notify(run: Run) -> None:
        notified.append((run.ordering_key, run.payload))

    guides.stand_in("app.actions.customers", notify=notify)
    module = guides.add(GUIDES / "ordered-runs.md", "async def ship(", name="orders")
    add_action(module, "call-ship", lambda run: module.ship(run.payload))
    async with instance(address) as here:
        assert (await here.run("call-ship", {"id": "1", "customer": "acme"})).state == "succeeded"
        await until(lambda: notified == [("acme", {"order": "1", "what": "shipped"})])


async def test_a_change_and_its_delivery_are_one_transaction(address: str, guides: Blocks) -> None:
    received: list[tuple[str, Any, str]] = []

    def receive(request: httpx.Request) -> httpx.Response:
        received.append((str(request.url), json.loads(request.content), request.headers["idempotency-key"]))
        return httpx.Response(204)

    module = guides.add(GUIDES / "ordered-runs.md", '@action("deliver"', name="deliveries")
    vars(module)["httpx"] = upstream(receive)

    async def close(run: Run) -> None:
        async with transaction() as session:
            await module.close_account(run.payload["account"], session)

    add_action(module, "call-close", close)
    create(address, "accounts (id bigint, closed boolean DEFAULT false)")
    async with instance(address) as here:
        await here.sql("INSERT INTO public.accounts VALUES (7)")
        assert (await here.run("call-close", {"account": 7})).state == "succeeded"
        await until(lambda: len(received) == 1)
        ((url, change, key),) = received
        assert (url, change) == ("https://ledger.example/events", {"account": 7, "what": "closed"})
        assert key.startswith("deliver-")
        assert await here.sql("SELECT closed FROM public.accounts") == [(True,)]


async def test_a_feed_whose_entries_are_studied_once(address: str, guides: Blocks) -> None:
    studied: list[Any] = []

    @action("study-notice")
    async def study_notice(run: Run) -> None:
        studied.append(run.payload["number"])

    async def fetch_notices() -> list[dict[str, str]]:
        return [{"number": "1"}, {"number": "2"}]

    guides.stand_in("app.actions.studies", study_notice=study_notice)
    module = guides.add(GUIDES / "seen-once.md", '@action("watch-notices"', name="notices")
    vars(module)["fetch_notices"] = fetch_notices
    async with instance(address) as here:
        for _ in range(2):
            await perform(here, "watch-notices")
        await until(lambda: sorted(studied) == ["1", "2"])


async def test_positions_that_are_kept_once(address: str, guides: Blocks) -> None:
    async def fetch_reports() -> list[dict[str, str]]:
        return [{"id": "1", "ship": "anna", "at": "dover"}, {"id": "2", "ship": "bo", "at": "calais"}]

    module = guides.add(GUIDES / "seen-once.md", '@action("import-positions"', name="positions")
    vars(module)["fetch_reports"] = fetch_reports
    create(address, "positions (ship text, at text)")
    async with instance(address) as here:
        for _ in range(2):
            await perform(here, "import-positions")
        assert await here.sql("SELECT ship FROM public.positions ORDER BY ship") == [("anna",), ("bo",)]


async def test_a_webhook_that_is_booked_once(address: str, guides: Blocks) -> None:
    booked: list[Any] = []

    @action("book-payment")
    async def book_payment(run: Run) -> None:
        booked.append(run.payload)

    guides.stand_in("app.actions.payments", book_payment=book_payment)
    module = guides.add(GUIDES / "seen-once.md", '@router.post("/webhooks/payments"', name="payments")
    add_action(module, "call-payment", lambda run: module.payment(run.payload))
    async with instance(address) as here:
        for _ in range(2):
            assert (await here.run("call-payment", {"id": "pay-1"})).state == "succeeded"
        await until(lambda: booked == [{"id": "pay-1"}])


async def test_an_action_that_emits_events(address: str, guides: Blocks) -> None:
    guides.add(GUIDES / "follow-runs.md", '@action("survey")', name="survey")
    async with instance(address) as here:
        run = await here.run("survey", {"places": ["bar", "wreck of the anna"]})
        assert run.state == "succeeded"
        kinds = [kind for (kind,) in await here.sql("SELECT kind FROM run_events WHERE run_id = %s", run.id)]
        assert {"progress", "log", "sounded"} <= set(kinds)


async def test_a_route_that_waits_for_a_run(address: str, guides: Blocks) -> None:
    class Wanted(BaseModel):
        place: str

    @action("sound")
    async def sound(run: Run[Wanted]) -> dict[str, float]:
        if run.payload.place == "shoal":
            raise GiveUp("too shallow")
        return {"metres": 4.2}

    guides.stand_in("app.actions.soundings", Wanted=Wanted, sound=sound)
    module = guides.add(GUIDES / "follow-runs.md", '@router.post("/places/{place}/depth")', name="depth")
    found: list[Any] = []

    async def ask(run: Run) -> None:
        try:
            found.append(await module.depth(run.payload["place"]))
        except HTTPException as error:
            found.append(error.status_code)

    add_action(module, "call-depth", ask)
    async with instance(address) as here:
        for place in ("dover", "shoal"):
            assert (await here.run("call-depth", {"place": place})).state == "succeeded"
    assert found == [{"metres": 4.2}, 502]


async def test_a_metric_of_the_service(guides: Blocks) -> None:
    module = guides.add(GUIDES / "monitor.md", "import Counter", name="metrics")
    try:
        assert b"parcels_shipped_total" in generate_latest()
    finally:
        REGISTRY.unregister(module.PARCELS)


async def test_a_tracer_of_the_service(guides: Blocks) -> None:
    module = guides.add(GUIDES / "traces.md", "get_tracer", name="traces")
    with module.tracer.start_as_current_span("a step"):
        pass


def add_action(module: types.ModuleType, name: str, body: Callable[[Run[Any]], Awaitable[Any]]) -> None:
    """Add an action that calls a function of a block, where the functions of the fleet are available."""

    @action(name, retries=0)
    async def call(run: Run) -> None:
        await body(run)

    vars(module)[name] = call


async def perform(here: LocalInstance, name: str) -> None:
    """Run a scheduled action now; if its own slot is due at this moment, after that run."""

    async def run() -> RunRecord | None:
        try:
            return await here.run(name)
        except AlreadyActive:
            return None

    assert (await soon(run)).state == "succeeded"


async def until(condition: Callable[[], bool]) -> None:
    async def is_met() -> bool:
        return condition()

    await soon(is_met)
