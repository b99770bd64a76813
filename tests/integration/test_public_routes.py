"""Routes without a key, the files of a service, the page at `/`, and the webhook of the guide."""

import hashlib
import hmac
import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import APIRouter
from pydantic import BaseModel

from app import main, routes
from app.fleet.api_keys import make_key
from app.fleet.http.front import links
from app.main import create_app
from app.settings import Settings
from tests.integration.test_audit import logged
from tests.integration.test_edge import is_problem
from tests.support.guides import import_program
from tests.support.runs import LocalInstance
from tests.support.service import Running, service
from tests.support.trial_actions import echo

pytestmark = pytest.mark.anyio

KEY, LINE = make_key("reader", "read")


class Note(BaseModel):
    text: str


public = APIRouter()


@public.post("/notes")
async def add_note(note: Note) -> str:
    return note.text


@pytest.fixture
def with_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "public", public)


# -- public routes ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("with_notes")
async def test_a_public_route_needs_no_key_and_has_the_limits_and_the_audit_of_all_routes(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(address, api_keys=LINE, max_body=2000, log_level="info") as running:
        assert (await running.client.post("/notes", json={"text": "ahoy"})).json() == "ahoy"
        # A payment provider leads a browser back with a form of its own page.
        foreign = {"sec-fetch-site": "cross-site", "origin": "https://pay.example"}
        assert (await running.client.post("/notes", json={"text": "paid"}, headers=foreign)).status_code == 200
        is_problem(await running.client.post("/notes", json={"text": "x" * 3000}), "payload-too-large")
        is_problem(await running.client.post("/trial/parcels", json={"weight": 1}), "unauthorized")
    (first, *_) = logged(caplog, "request.audited")
    assert (first["caller"], first["route"], first["status"]) == (None, "/notes", 200)


@pytest.mark.usefixtures("with_notes")
def test_a_public_route_declares_no_security_in_the_openapi_document() -> None:
    document = create_app(Settings.load()).openapi()
    assert "security" not in document["paths"]["/notes"]["post"]
    assert not {"401", "403"} & set(document["paths"]["/notes"]["post"]["responses"])
    assert "security" in document["paths"]["/runs:batch"]["post"]


@pytest.mark.template
async def test_the_webhook_of_the_guide_books_each_signed_delivery_once(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = import_program(monkeypatch, "your-own", "class Settings(FleetSettings)")
    # Stands in for the module of the action.
    monkeypatch.setitem(sys.modules, "app.actions.payments", SimpleNamespace(book_payment=echo))
    webhook = import_program(monkeypatch, "your-own", '"/webhooks/payments"')
    monkeypatch.setattr(routes, "public", webhook.router)
    given = {"api_keys": LINE, "actions": ("tests.support.trial_actions",)}
    async with service(address, settings.Settings, **given, payment_secret="s3cret") as running:
        delivery = json.dumps({"id": "d-1", "amount": 250}).encode()
        for _ in range(3):
            assert (await deliver(running, delivery, "s3cret")).status_code == 204
        is_problem(await deliver(running, delivery, "guessed"), "unauthorized")
        is_problem(await deliver(running, delivery.replace(b"250", b"251"), "s3cret", of=delivery), "unauthorized")
        is_problem(await deliver(running, b'{"id": "d-2"}', "s3cret"), "invalid")
        runs = await LocalInstance(running).sql("SELECT payload FROM runs UNION ALL SELECT payload FROM finished_runs")
        assert runs == [({"id": "d-1", "amount": 250},)]
    async with service(address, settings.Settings, **given) as running:
        is_problem(await deliver(running, delivery, "s3cret"), "unavailable")


class Payments:
    """Stands in for the module of the action."""

    book_payment = echo


async def deliver(running: Running, body: bytes, secret: str, of: bytes | None = None) -> httpx.Response:
    signature = hmac.new(secret.encode(), of or body, hashlib.sha256).hexdigest()
    return await running.client.post("/webhooks/payments", content=body, headers={"x-signature": signature})


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder `static` beside the application."""
    monkeypatch.setattr(main, "__file__", str(tmp_path / "main.py"))
    own = tmp_path / "static"
    own.mkdir()
    return own


async def test_files_are_served_without_a_key_and_browsers_ask_whether_they_have_changed(
    address: str, folder: Path
) -> None:
    (folder / "css").mkdir()
    (folder / "css" / "site.css").write_text("body { color: teal }")
    async with service(address, api_keys=LINE) as running:
        first = await running.client.get("/static/css/site.css")
        assert (first.status_code, first.text) == (200, "body { color: teal }")
        assert first.headers["content-type"].startswith("text/css")
        assert first.headers["cache-control"] == "no-cache"
        assert first.headers["x-content-type-options"] == "nosniff"
        known = {"if-none-match": first.headers["etag"]}
        assert (await running.client.get("/static/css/site.css", headers=known)).status_code == 304
        assert (await running.client.head("/static/css/site.css")).headers["content-length"] == "20"
        is_problem(await running.client.get("/static/css"), "not-found")
        is_problem(await running.client.post("/static/css/site.css"), "method-not-allowed")


async def test_a_path_out_of_the_folder_is_not_found(address: str, folder: Path) -> None:
    (folder / "a.txt").write_text("a")
    (folder.parent / "secret.txt").write_text("hunter2")
    (folder / "link.txt").symlink_to(folder.parent / "secret.txt")
    async with service(address) as running:
        for path in (
            "../secret.txt",
            "%2e%2e/secret.txt",
            "..%2fsecret.txt",
            "/etc/passwd",
            "link.txt",
            "%00",
        ):
            answer = await running.client.get(httpx.URL(f"http://service/static/{path}"))
            assert answer.status_code == 404, path
            assert "hunter2" not in answer.text
        assert (await running.client.get("/static/a.txt")).text == "a"


async def test_without_files_nothing_is_served_there(address: str, folder: Path) -> None:  # noqa: ARG001 — it is empty
    async with service(address) as running:
        is_problem(await running.client.get("/static/"), "not-found")


# -- the page at the root ---------------------------------------------------------------------------------------------


class Links(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append(dict(attrs)["href"] or "")


async def test_the_page_at_the_root_links_to_what_the_service_has(address: str) -> None:
    async with service(address) as running:
        page = await running.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert page.headers["content-security-policy"] == links.POLICY
        assert Links(page.text).found == list(links.LINKS)
        for path in links.LINKS:
            assert (await running.client.get(path)).status_code == 200, path


async def test_in_production_the_page_needs_no_key_and_links_to_nothing_that_does_not_exist(address: str) -> None:
    async with service(address, environment="production", api_keys=LINE, migrate_on_start=True) as running:
        page = await running.client.get("/")
        assert page.status_code == 200
        assert Links(page.text).found == [path for path in links.LINKS if path != "/docs"]
        member = running.context.member
        assert member.identity is not None
        assert member.identity.name not in page.text


@pytest.mark.parametrize("which", ["public", "router"])
async def test_a_route_of_the_service_at_the_root_is_found_first(
    address: str, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    own = APIRouter()

    @own.get("/")
    async def front() -> str:
        return "ours"

    monkeypatch.setattr(routes, which, own)
    async with service(address) as running:
        assert (await running.client.get("/")).json() == "ours"
