"""A sign-in of the service itself, for the API and the dashboard, in place of API keys; and the recipes for it."""

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, HTTPException, Request

from app import routes, startup
from app.fleet import Caller
from app.fleet.api_keys import make_key
from app.fleet.cli.doctor import check_settings
from app.fleet.errors import SettingsError
from app.main import create_app
from app.settings import Settings
from tests.integration.test_audit import logged
from tests.integration.test_edge import is_problem
from tests.support.guides import import_program
from tests.support.postgres import BOUND
from tests.support.runs import LocalInstance, local_instance, soon
from tests.support.service import Running, service

pytestmark = pytest.mark.anyio

KEY, LINE = make_key("machine", "read")
SCOPES = {"carol": "operate", "dave": "read", "erin": "admin"}
calls: list[str] = []


async def by_word(request: Request) -> Caller:
    """Believe the word that a request is sent with."""
    word = request.headers.get("authorization", "").removeprefix("Bearer ")
    calls.append(word)
    if word == "body":
        await request.body()
    if word == "broken":
        raise httpx.ConnectError("the provider does not answer")
    if word == "waits":
        await asyncio.Event().wait()
    if word == "nothing":
        return None  # type: ignore[return-value]
    if word == "browser":
        raise HTTPException(303, headers={"Location": "/login"})
    if word == "mallory":
        raise HTTPException(403, "mallory may not use this service")
    if word not in SCOPES:
        raise HTTPException(401, "say who you are", headers={"WWW-Authenticate": "Bearer"})
    return Caller(word, SCOPES[word])  # type: ignore[arg-type]


@pytest.fixture
def signed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "sign_in", by_word, raising=False)
    calls.clear()


@pytest.fixture
async def here(address: str, signed_in: None) -> AsyncIterator[LocalInstance]:  # noqa: ARG001 — it declares the sign-in
    async with local_instance(address, log_level="info", streams_per_key=1) as own:
        yield own


async def ask(here: LocalInstance, word: str | None, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {word}"} if word else {}
    return await here.running.client.request(method, path, headers=headers | more.pop("headers", {}), **more)


# -- the API ----------------------------------------------------------------------------------------------------------


async def test_the_sign_in_decides_who_may_call_what(here: LocalInstance, caplog: pytest.LogCaptureFixture) -> None:
    refused = await ask(here, None, "GET", "/actions")
    assert is_problem(refused, "unauthorized")["detail"] == "say who you are"
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await ask(here, "dave", "GET", "/actions")).status_code == 200
    detail = is_problem(await ask(here, "dave", "POST", "/actions/noop/pause"), "forbidden")["detail"]
    assert detail == "this request needs the scope 'operate', and its caller has 'read'"
    assert (
        is_problem(await ask(here, "mallory", "GET", "/runs"), "forbidden")["detail"]
        == "mallory may not use this service"
    )
    assert (await ask(here, "carol", "POST", "/actions/noop/pause")).status_code == 200
    is_problem(await ask(here, "carol", "DELETE", "/locks/none?reason=why"), "forbidden")
    is_problem(await ask(here, "erin", "DELETE", "/locks/none?reason=why"), "not-found")
    # The service's own routes too; probes are open.
    is_problem(await ask(here, "dave", "POST", "/trial/parcels", json={"weight": 1}), "forbidden")
    assert (await ask(here, "carol", "POST", "/trial/parcels", json={"weight": 1})).status_code == 200
    assert (await ask(here, None, "GET", "/health/live")).status_code == 200
    named = [(each["caller"], each["status"]) for each in logged(caplog, "request.audited")]
    assert named == [("dave", 403), ("carol", 200), ("carol", 403), ("erin", 404), ("dave", 403), ("carol", 200)]


async def test_the_sign_in_is_called_once_for_a_request_and_before_its_body_is_read(here: LocalInstance) -> None:
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(3):
            read += 1
            yield b"x" * 100

    headers = {"content-type": "application/json"}
    is_problem(await ask(here, "dave", "POST", "/trial/parcels", content=chunks(), headers=headers), "forbidden")
    assert (read, calls) == (0, ["dave"])
    calls.clear()
    assert (await ask(here, "carol", "POST", "/trial/parcels", json={"weight": 1})).status_code == 200
    assert calls == ["carol"]


@pytest.mark.parametrize("word", ["broken", "nothing", "body"])
async def test_a_sign_in_that_fails_refuses_the_request_with_503(
    here: LocalInstance, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    for method, path in (("GET", "/actions"), ("POST", "/actions/noop/runs"), ("POST", "/trial/parcels")):
        answer = await ask(here, word, method, path, **({"json": {"weight": 1}} if method == "POST" else {}))
        is_problem(answer, "unavailable")
        assert answer.headers["retry-after"] == "5"
    assert len(logged(caplog, "sign_in.failed")) == 3
    assert await here.sql("SELECT count(*) FROM runs") == [(0,)]


async def test_a_sign_in_that_does_not_return_refuses_the_request_after_a_time(
    here: LocalInstance, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.edge.auth.SIGN_IN_TIMEOUT", 0.05)
    is_problem(await asyncio.wait_for(ask(here, "waits", "GET", "/actions"), BOUND), "unavailable")
    assert len(logged(caplog, "sign_in.failed")) == 1
    assert (await ask(here, "dave", "GET", "/actions")).status_code == 200


async def test_api_keys_remain_valid_beside_the_sign_in_in_their_own_header(address: str, signed_in: None) -> None:  # noqa: ARG001
    async with service(address, api_keys=LINE) as running:
        client = running.client
        assert (await client.get("/metrics", headers={"x-api-key": KEY})).status_code == 200
        is_problem(await client.post("/actions/a/pause", headers={"x-api-key": KEY}), "forbidden")
        is_problem(await client.get("/metrics", headers={"x-api-key": "flotilla_wrong"}), "unauthorized")
        assert calls == []
        is_problem(await client.get("/metrics", headers={"authorization": f"Bearer {KEY}"}), "unauthorized")
        assert calls == [KEY]


async def test_a_page_of_another_site_changes_nothing_though_the_browser_is_signed_in(here: LocalInstance) -> None:
    for foreign in ({"sec-fetch-site": "cross-site"}, {"origin": "https://elsewhere.example"}):
        is_problem(await ask(here, "carol", "POST", "/actions/noop/pause", headers=foreign), "forbidden")
        assert (await ask(here, "carol", "GET", "/actions/noop", headers=foreign)).json()["state"] == "active"


async def test_the_number_of_streams_is_limited_by_the_name_of_the_caller(here: LocalInstance) -> None:
    run_id = await here.trigger("nap", {"seconds": 600})
    path, context = f"/runs/{run_id}/events", here.running.context
    stream = asyncio.create_task(ask(here, "dave", "GET", path))
    await soon(lambda: here.sql("SELECT 1 WHERE %s", context.open_streams.total() == 1))
    is_problem(await ask(here, "dave", "GET", path), "unavailable")
    await ask(here, "carol", "POST", f"/runs/{run_id}/cancel")
    assert (await stream).status_code == 200


def test_the_openapi_document_declares_tokens_and_no_keys(signed_in: None) -> None:  # noqa: ARG001
    document = create_app(Settings.load()).openapi()
    assert list(document["components"]["securitySchemes"]) == ["HTTPBearer"]
    assert document["paths"]["/actions"]["get"]["security"] == [{"HTTPBearer": []}]
    assert "key" not in document["components"]["securitySchemes"]["HTTPBearer"]["description"]


# -- the dashboard ----------------------------------------------------------------------------------------------------


async def test_the_dashboard_shows_the_caller_and_has_no_sign_in_of_its_own(here: LocalInstance) -> None:
    page = await ask(here, "carol", "GET", "/dashboard")
    assert page.status_code == 200
    assert "carol (operate)" in page.text
    assert "Sign out" not in page.text
    # A page, not a redirect to the form for a key.
    refused = await ask(here, None, "GET", "/dashboard")
    assert (refused.status_code, "say who you are" in refused.text) == (401, True)
    assert refused.headers["content-type"] == "text/html; charset=utf-8"
    assert (await ask(here, "carol", "GET", "/dashboard/sign-in")).headers["location"] == "/dashboard"
    # A sign-in may lead a browser elsewhere.
    led = await ask(here, "browser", "GET", "/dashboard/runs")
    assert (led.status_code, led.headers["location"]) == (303, "/login")


async def test_a_form_of_the_dashboard_needs_the_scope_and_its_token(
    here: LocalInstance, caplog: pytest.LogCaptureFixture
) -> None:
    await ask(here, "carol", "GET", "/dashboard")
    token = here.running.client.cookies["flotilla-form"]
    pause = "/dashboard/actions/noop/pause"
    assert (await ask(here, "carol", "POST", pause, data={"token": "0" * 32})).status_code == 403
    assert (await ask(here, "dave", "POST", pause, data={"token": token})).status_code == 403
    assert (await ask(here, "carol", "POST", pause, data={"token": token})).status_code == 303
    assert [each["caller"] for each in logged(caplog, "request.audited")] == ["carol", "dave", "carol"]


# -- the start --------------------------------------------------------------------------------------------------------


def test_in_production_the_service_needs_keys_or_a_sign_in(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings.load(environment="production", database_url="postgresql://db.example/app")
    with pytest.raises(SettingsError, match="API_KEYS is not set, and ENVIRONMENT is 'production'"):
        create_app(settings)
    (_, finding) = check_settings(settings)
    assert "no instance starts" in str(finding)
    monkeypatch.setattr(startup, "sign_in", by_word, raising=False)
    assert create_app(settings).state.fleet.protected
    assert "the service's own" in str(list(check_settings(settings))[1])


@pytest.mark.parametrize(("name", "scope"), [("", "read"), ("a\nb", "read"), ("x" * 201, "read"), ("carol", "root")])
def test_a_caller_has_a_printable_name_and_a_known_scope(name: str, scope: Any) -> None:
    with pytest.raises(ValueError, match="of a caller"):
        Caller(name, scope)


# -- docs/guides/sign-in.md -------------------------------------------------------------------------------------------


@pytest.mark.template
async def test_the_first_example_of_the_guide(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import_program(monkeypatch, "sign-in", "let-me-in")
    async with service(address) as running:
        is_problem(await running.client.get("/actions"), "unauthorized")
        assert (await running.client.get("/actions", headers={"authorization": "Bearer let-me-in"})).status_code == 200


class Provider:
    """An identity provider: its key, the tokens it signs, and how often its keys were read."""

    def __init__(self) -> None:
        ec = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ec")
        self.reads = 0
        self.away = False
        self._private = ec.generate_private_key(ec.SECP256R1())

    def keys(self, request: httpx.Request) -> httpx.Response:
        self.reads += 1
        if self.away:
            raise httpx.ConnectError("no route", request=request)
        numbers = self._private.public_key().public_numbers()
        x, y = (base64.urlsafe_b64encode(each.to_bytes(32)).rstrip(b"=").decode() for each in (numbers.x, numbers.y))
        return httpx.Response(
            200,
            json={"keys": [{"kty": "EC", "crv": "P-256", "kid": "k1", "alg": "ES256", "use": "sig", "x": x, "y": y}]},
        )

    def token(self, *, kid: str = "k1", **claims: Any) -> str:
        jwt = pytest.importorskip("jwt")
        usual = {
            "iss": "https://login.example/realms/main", "aud": "flotilla", "sub": "u-1", "exp": time.time() + 600,
            "roles": ["flotilla-operator"], "email": "carol@example.org",
        }  # fmt: skip
        given = {name: value for name, value in (usual | claims).items() if value is not None}
        return str(jwt.encode(given, self._private, "ES256", headers={"kid": kid}))


@pytest.fixture
async def oidc(address: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Running, Provider]]:
    """The service with the recipe for tokens, and its provider, without a network."""
    pytest.importorskip("jwt")
    provider = Provider()
    settings = import_program(monkeypatch, "sign-in", "oidc_issuer: str")
    own = import_program(monkeypatch, "sign-in", "class Issuer:")

    def client(**options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(provider.keys), **options)

    monkeypatch.setattr(own, "httpx", SimpleNamespace(AsyncClient=client))
    clock = {"now": 1000.0}
    monkeypatch.setattr(own, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    async with service(address, settings.Settings) as running:
        running.app.state.pass_time = lambda seconds: clock.__setitem__("now", clock["now"] + seconds)
        yield running, provider


async def status(running: Running, token: str, method: str = "GET", path: str = "/actions") -> int:
    answer = await running.client.request(method, path, headers={"authorization": f"Bearer {token}"})
    return answer.status_code


@pytest.mark.template
async def test_a_token_of_the_provider_gives_the_scope_of_its_strongest_role(oidc: tuple[Running, Provider]) -> None:
    running, provider = oidc
    assert await status(running, provider.token()) == 200
    assert await status(running, provider.token(), "DELETE", "/locks/none?reason=why") == 403
    both = provider.token(roles=["flotilla-reader", "flotilla-admin"])
    assert await status(running, both, "DELETE", "/locks/none?reason=why") == 404
    assert await status(running, provider.token(roles=["baker"])) == 403
    assert await status(running, provider.token(roles=None)) == 403
    assert provider.reads == 1


@pytest.mark.template
async def test_a_token_that_the_provider_did_not_issue_for_this_service_is_refused(
    oidc: tuple[Running, Provider],
) -> None:
    running, provider = oidc
    genuine = provider.token()
    for wrong in (
        provider.token(exp=time.time() - 10),
        provider.token(exp=None),
        provider.token(aud="another"),
        provider.token(iss="https://login.example/realms/test"),
        provider.token(sub=None),
        Provider().token(),
        unsigned(genuine),
        genuine[:-8] + "AAAAAAAA",
        "nonsense",
        "",
    ):
        assert await status(running, wrong) == 401, wrong
    assert (await running.client.get("/actions")).status_code == 401
    assert await status(running, genuine) == 200


def unsigned(token: str) -> str:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "kid": "k1"}).encode()).rstrip(b"=").decode()
    return f"{head}.{token.split('.')[1]}."


@pytest.mark.template
async def test_the_keys_are_read_again_for_a_new_key_but_not_for_each_token(oidc: tuple[Running, Provider]) -> None:
    running, provider = oidc
    for number in range(20):
        assert await status(running, provider.token(kid=f"unknown-{number}")) == 401
    assert provider.reads == 1
    running.app.state.pass_time(61)
    assert await status(running, provider.token(kid="unknown")) == 401
    assert provider.reads == 2
    running.app.state.pass_time(3601)
    assert await status(running, provider.token()) == 200
    assert provider.reads == 3


@pytest.mark.template
async def test_without_the_provider_the_keys_that_were_read_are_used_and_without_keys_the_answer_is_503(
    oidc: tuple[Running, Provider],
) -> None:
    running, provider = oidc
    provider.away = True
    assert [await status(running, provider.token()) for _ in range(2)] == [503, 503]
    provider.away = False
    running.app.state.pass_time(61)
    assert await status(running, provider.token()) == 200
    provider.away = True
    running.app.state.pass_time(120)
    assert await status(running, provider.token()) == 200


@pytest.mark.template
async def test_the_header_of_a_proxy_counts_only_from_a_trusted_proxy(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_program(monkeypatch, "sign-in", "x-forwarded-email")
    headers = {"x-forwarded-email": "carol@example.org", "x-forwarded-groups": "staff,developers"}
    own = APIRouter()

    @own.get("/me")
    async def show_client(request: Request) -> list[str | None]:
        return [request.client.host if request.client else None, request.state.proxy]

    monkeypatch.setattr(routes, "public", own)
    async with service(address, trusted_proxies="10.1.0.0/16") as running:
        # What `httpx` sends, the proxy has passed on.
        proxy = httpx.ASGITransport(running.app, raise_app_exceptions=False, client=("10.1.2.3", 4000))
        async with httpx.AsyncClient(transport=proxy, base_url="http://service") as through:
            forwarded = headers | {"x-forwarded-for": "198.51.100.7"}
            assert (await through.post("/actions/none/pause", headers=forwarded)).status_code == 404
            assert (await through.get("/me", headers=forwarded)).json() == ["198.51.100.7", "10.1.2.3"]
            assert (
                await through.get("/actions", headers=forwarded | {"x-forwarded-groups": "guests"})
            ).status_code == 403
            assert (await through.get("/actions")).status_code == 401
        # Directly, the same headers are a claim of the client.
        for claim in (headers, headers | {"x-forwarded-for": "10.1.2.3"}):
            is_problem(await running.client.get("/actions", headers=claim), "unauthorized")
        assert (await running.client.get("/me", headers={"x-forwarded-for": "10.1.2.3"})).json() == ["127.0.0.1", None]
