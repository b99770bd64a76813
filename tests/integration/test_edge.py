"""The HTTP edge: the format of errors, request ids, limits, headers, API keys and probes."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import Response

from app.fleet.api_keys import make_key
from app.fleet.edge import readiness
from app.fleet.edge.problems import KINDS
from app.fleet.edge.readiness import CACHED_FOR
from app.fleet.http.metrics import values
from app.fleet.telemetry.metrics import DEFINITIONS
from tests.support.postgres import BOUND, Postgres
from tests.support.proxy import Proxy
from tests.support.runs import soon
from tests.support.service import Running, service

pytestmark = pytest.mark.anyio


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits until the database answers, also on a busy machine."""
    monkeypatch.setattr(readiness, "TIMEOUT", 60.0)


@pytest.fixture
async def running(address: str) -> AsyncIterator[Running]:
    async with service(address) as own:
        yield own


@asynccontextmanager
async def service_with_a_busy_pool(address: str) -> AsyncIterator[Running]:
    """A service whose only connection is borrowed, and whose callers wait for it only for a moment."""
    async with service(address, pool_min=1, pool_max=1) as running, running.context.database.connection():
        # Only from now on: the start-up may have to wait longer.
        running.context.database._pool.timeout = 0.2
        yield running


def is_problem(answer: httpx.Response, slug: str, status: int | None = None) -> dict[str, object]:
    """Check the format of a problem, and return the body."""
    body: dict[str, object] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.status_code == (status or KINDS[slug].status) == body["status"]
    assert body["type"] == f"/problems/{slug}"
    assert body["title"]
    assert body["detail"]
    assert body["request_id"] == answer.headers["x-request-id"]
    return body


# -- probes -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_probes_return_only_their_status(running: Running) -> None:
    live = await running.client.get("/health/live")
    ready = await running.client.get("/health/ready")
    assert (live.status_code, live.json()) == (200, {"status": "alive"})
    assert (ready.status_code, ready.json()) == (200, {"status": "ready"})


async def test_the_list_of_instances_has_the_documented_fields(running: Running) -> None:
    view = (await running.client.get("/health/instances")).json()
    assert set(view) == {"namespace", "self", "leader", "instances", "anomalies"}
    promised = {"id", "name", "run_id", "state", "hostname", "pid", "version", "started_at", "heartbeat_age_ms"}
    promised |= {"leader", "running", "locks", "workspace"}
    (me,) = view["instances"]
    assert promised <= set(me)
    assert me["name"] == view["self"]
    assert me["state"] == "ready"
    assert me["locks"] == []


@pytest.mark.usefixtures("patient")
async def test_many_probes_query_the_database_only_once(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    database, pings = running.context.database, 0
    ping = database.ping

    async def counted() -> None:
        nonlocal pings
        pings += 1
        await ping()

    monkeypatch.setattr(database, "ping", counted)
    await asyncio.sleep(CACHED_FOR + 0.1)
    began = time.monotonic()
    answers = await asyncio.gather(*(running.client.get("/health/ready") for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    # More than once only if all probes together take longer than a good result is cached.
    assert 1 <= pings <= 1 + (time.monotonic() - began) / CACHED_FOR


async def test_an_instance_is_ready_if_the_database_answers_while_the_event_loop_is_busy(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Most of this time is left for the answer, also on a busy machine.
    monkeypatch.setattr(readiness, "TIMEOUT", 4.0)
    ping = running.context.database.ping

    async def busy() -> None:
        # For longer than a probe waits, before anything was sent.
        await asyncio.to_thread(time.sleep, 0)
        time.sleep(4.2)  # noqa: ASYNC251 — it blocks the loop on purpose
        await ping()

    monkeypatch.setattr(running.context.database, "ping", busy)
    # A good result is cached for this time.
    await asyncio.sleep(CACHED_FOR + 0.1)
    assert (await running.client.get("/health/ready")).status_code == 200


@pytest.mark.usefixtures("patient")
async def test_the_readiness_probe_returns_503_as_soon_as_the_instance_drains(running: Running) -> None:
    assert (await running.client.get("/health/ready")).status_code == 200
    running.context.lifecycle.drain("testing")
    answer = await running.client.get("/health/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "draining")
    assert answer.headers["connection"] == "close"
    assert (await running.client.get("/health/live")).status_code == 200


@pytest.mark.usefixtures("patient")
async def test_a_busy_pool_does_not_make_an_instance_unready(address: str) -> None:
    async with service_with_a_busy_pool(address) as running:
        assert (await running.client.get("/health/ready")).status_code == 200


async def test_a_probe_is_answered_even_if_the_database_does_not_respond(address: str, postgres: Postgres) -> None:
    name = address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        async with service(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}") as running:
            proxy.swallow()
            await asyncio.sleep(CACHED_FOR + 0.1)
            answer = await asyncio.wait_for(running.client.get("/health/ready"), BOUND)
            assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
            assert (await running.client.get("/health/live")).status_code == 200
            proxy.heal()
            proxy.cut()


# -- problems ---------------------------------------------------------------------------------------------------------


async def test_an_unknown_path_is_a_problem(running: Running) -> None:
    is_problem(await running.client.get("/nowhere"), "not-found")


async def test_a_wrong_method_is_a_problem_that_names_the_allowed_ones(running: Running) -> None:
    answer = await running.client.delete("/health/live")
    is_problem(answer, "method-not-allowed")
    assert answer.headers["allow"] == "GET, HEAD"


async def test_a_path_with_an_extra_slash_is_a_problem_and_not_redirected(
    running: Running,
) -> None:
    for path in ("/actions/", "/health/live/", "/runs/"):
        answer = await running.client.get(path, headers={"host": "elsewhere.example"})
        is_problem(answer, "not-found")
        assert "elsewhere.example" not in str(answer.headers) + answer.text


async def test_an_invalid_field_is_named_and_its_value_not_repeated(running: Running) -> None:
    answer = await running.client.post("/trial/parcels", json={"weight": "s3cret"})
    body = is_problem(answer, "invalid")
    assert "weight" in str(body["detail"])
    assert body["errors"] == [
        {"field": "weight", "message": "Input should be a valid integer, unable to parse string as an integer"}
    ]
    assert "s3cret" not in answer.text


@pytest.mark.parametrize("content", [b"{", b'{"weight": }', b"\xff\xfe", b"[1, 2"])
async def test_a_malformed_body_is_a_problem(running: Running, content: bytes) -> None:
    answer = await running.client.post("/trial/parcels", content=content, headers={"content-type": "application/json"})
    assert answer.status_code in {400, 422}
    is_problem(answer, "invalid" if answer.status_code == 422 else "bad-request")


async def test_a_wrong_content_type_is_answered_with_415_and_the_right_one(running: Running) -> None:
    answer = await running.client.post(
        "/trial/parcels", content=b"weight=3", headers={"content-type": "application/x-www-form-urlencoded"}
    )
    body = is_problem(answer, "unsupported-media-type")
    assert "application/json" in str(body["detail"])


async def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_read(address: str) -> None:
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 1024
            yield b"x" * 1024

    async with service(address, max_body=2048) as running:
        headers = {"content-length": str(64 * 1024), "content-type": "application/octet-stream"}
        answer = await running.client.post("/trial/raw", content=chunks(), headers=headers)
        is_problem(answer, "payload-too-large")
    assert read <= 1024


async def test_a_body_without_a_declared_length_is_refused_when_it_exceeds_the_limit(address: str) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 1024

    async with service(address, max_body=2048) as running:
        for path, content_type in (("/trial/raw", "application/octet-stream"), ("/trial/parcels", "application/json")):
            answer = await running.client.post(path, content=chunks(), headers={"content-type": content_type})
            is_problem(answer, "payload-too-large")
        within = await running.client.post(
            "/trial/raw", content=b"x" * 2048, headers={"content-type": "application/octet-stream"}
        )
        assert within.status_code == 200


async def test_an_unexpected_error_is_answered_with_the_request_id_and_no_details(running: Running) -> None:
    answer = await running.client.get("/trial/fail")
    body = is_problem(answer, "internal")
    assert "hunter2" not in answer.text
    assert answer.headers["x-request-id"] in str(body["detail"])


async def test_a_busy_pool_is_answered_with_503_and_retry_after(address: str) -> None:
    async with service_with_a_busy_pool(address) as running:
        answer = await running.client.get("/trial/database")
        is_problem(answer, "unavailable")
        assert answer.headers["retry-after"] == "1"


async def test_every_kind_of_problem_has_a_page_at_its_type(running: Running) -> None:
    overview = (await running.client.get("/problems")).text
    for slug, kind in KINDS.items():
        page = await running.client.get(f"/problems/{slug}")
        assert page.status_code == 200
        assert kind.title in page.text
        assert f"/problems/{slug}" in overview
    is_problem(await running.client.get("/problems/none-such"), "not-found")


# -- headers and ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/health/live", "/nowhere", "/trial/fail"])
async def test_every_response_has_the_security_headers_and_a_request_id(running: Running, path: str) -> None:
    answer = await running.client.get(path)
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["x-frame-options"] == "DENY"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert len(answer.headers["x-request-id"]) == 32
    assert "strict-transport-security" not in answer.headers


async def test_a_valid_request_id_is_kept_and_an_invalid_one_replaced(running: Running) -> None:
    for given, kept in (("abc-123.x:y", True), ("a" * 129, False), ("has spaces", False), ('"quoted"', False)):
        answer = await running.client.get("/health/live", headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) is kept


async def test_the_count_of_requests_in_flight_is_correct_however_requests_end(running: Running) -> None:
    slow = asyncio.create_task(running.client.get("/trial/slow?seconds=0.3"))
    while not running.context.in_flight:  # noqa: ASYNC110 — a counter sends no signal
        await asyncio.sleep(0.01)
    assert running.context.in_flight == 1
    await slow
    for path in ("/nowhere", "/trial/fail", "/health/live"):
        await running.client.get(path)
    cancelled = asyncio.create_task(running.client.get("/trial/slow?seconds=60"))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    await asyncio.gather(cancelled, return_exceptions=True)
    assert running.context.in_flight == 0


@pytest.mark.parametrize(
    "path", ["/health/live", "/health/instances", "/actions", "/runs", "/problems", "/trial/database"]
)
async def test_head_has_the_status_and_headers_of_get_and_no_body(running: Running, path: str) -> None:
    get, head = await running.client.get(path), await running.client.head(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    for name in ("content-type", "cache-control", "x-frame-options"):
        assert head.headers[name] == get.headers[name]
    assert "content-length" in head.headers
    assert running.context.in_flight == 0


async def test_head_is_refused_like_get_for_unknown_paths_and_paths_without_get(running: Running) -> None:
    for path, status in (("/nowhere", 404), ("/runs/1", 404), ("/runs/x", 400), ("/runs:retry", 405)):
        assert (await running.client.head(path)).status_code == status
    assert (await running.client.head("/runs:retry")).headers["allow"] == "POST"


async def test_head_of_a_stream_is_answered_at_once_and_leaves_no_stream_open(running: Running) -> None:
    for path in ("/events", "/trial/events", "/trial/download?seconds=3600"):
        head = await asyncio.wait_for(running.client.head(path), 60)
        assert (head.status_code, head.content) == (200, b"")
        assert running.context.open_streams.total() == running.context.in_flight == 0
    assert (await running.client.head("/events")).headers["content-type"].startswith("text/event-stream")


async def test_a_head_route_of_the_service_takes_precedence_over_get(running: Running) -> None:
    async def answer_head() -> Response:
        return Response(headers={"x-asked": "head"})

    running.app.add_api_route("/own", answer_head, methods=["HEAD"])
    assert (await running.client.head("/own")).headers["x-asked"] == "head"


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_an_api_key_allows_only_the_requests_of_its_scope(address: str) -> None:
    keys = {scope: make_key(scope, scope) for scope in ("read", "operate", "admin")}
    lines = ",".join(line for _, line in keys.values())
    async with service(address, api_keys=lines) as running:
        for path in ("/health/live", "/health/ready", "/problems"):
            assert (await running.client.get(path)).status_code == 200, "probes and problem pages stay open"
        for path in ("/health/instances", "/metrics", "/trial/database"):
            refused = await running.client.get(path)
            is_problem(refused, "unauthorized")
            assert refused.headers["www-authenticate"].startswith("Bearer")
            for key, _ in keys.values():
                assert (await running.client.get(path, headers={"authorization": f"Bearer {key}"})).status_code == 200
                assert (await running.client.get(path, headers={"x-api-key": key})).status_code == 200
        wrong = await running.client.get("/metrics", headers={"authorization": "Bearer flotilla_wrong"})
        is_problem(wrong, "unauthorized")
        parcel = {"weight": 1}
        answers = {
            scope: await running.client.post("/trial/parcels", json=parcel, headers={"x-api-key": key})
            for scope, (key, _) in keys.items()
        }
        is_problem(answers["read"], "forbidden")
        assert answers["operate"].status_code == answers["admin"].status_code == 200


@pytest.mark.parametrize("path", ["/runs:retry", "/runs:batch", "/actions/tick/runs", "/trial/parcels", "/trial/raw"])
@pytest.mark.parametrize(("key", "slug"), [(None, "unauthorized"), ("wrong", "unauthorized"), ("reader", "forbidden")])
async def test_the_api_key_is_checked_before_the_body_is_read(
    address: str, path: str, key: str | None, slug: str
) -> None:
    read = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 1
            yield b" " * 1024

    reader, line = make_key("reader", "read")
    headers = {"content-type": "application/json"} | ({"x-api-key": reader if key == "reader" else key} if key else {})
    async with service(address, api_keys=line) as running:
        is_problem(await running.client.post(path, content=chunks(), headers=headers), slug)
    assert read == 0


FOREIGN = (
    {"sec-fetch-site": "cross-site"},
    {"sec-fetch-site": "cross-site", "origin": "http://service"},
    {"origin": "http://elsewhere.example"},
    {"origin": "null"},
)
OWN: tuple[dict[str, str], ...] = (
    {},
    {"sec-fetch-site": "same-origin", "origin": "http://service"},
    {"sec-fetch-site": "none"},
    {"origin": "http://service"},
)


async def test_without_api_keys_requests_from_pages_of_other_sites_are_refused(running: Running) -> None:
    async with running.context.database.connection() as connection:
        before = (await (await connection.execute("SELECT count(*) FROM flotilla.runs")).fetchone() or (None,))[0]
    for headers in FOREIGN:
        for path in ("/actions/tick/pause", "/actions/tick/runs", "/runs/1/cancel", "/trial/once/a"):
            is_problem(await running.client.post(path, headers=headers), "forbidden")
        is_problem(await running.client.delete("/locks/a?reason=b", headers=headers), "forbidden")
        assert (await running.client.get("/health/live", headers=headers)).status_code == 200
    for headers in OWN:
        assert (await running.client.post("/trial/once/a", headers=headers)).status_code == 200
        assert (await running.client.post("/runs/1/cancel", headers=headers)).status_code == 404
    async with running.context.database.connection() as connection:
        after = (await (await connection.execute("SELECT count(*) FROM flotilla.runs")).fetchone() or (None,))[0]
    assert before == after


async def test_with_api_keys_the_key_decides_and_not_the_site_of_the_page(address: str) -> None:
    key, line = make_key("operator", "operate")
    async with service(address, api_keys=line) as running:
        for headers in FOREIGN:
            answer = await running.client.post("/trial/once/a", headers={**headers, "x-api-key": key})
            assert answer.status_code == 200
            is_problem(await running.client.post("/trial/once/a", headers=headers), "unauthorized")


@pytest.mark.parametrize(
    "given", ["text/plain; json", "text/plain;application/json", "text/json", "", "multipart/form-data"]
)
async def test_a_body_with_a_content_type_of_html_forms_is_not_read_as_json(running: Running, given: str) -> None:
    bodies = {
        "/actions/tick/runs": b"{}",
        "/runs:batch": b'{"runs": [{"action": "tick"}]}',
        "/runs:retry": b'{"action": "tick"}',
        "/trial/parcels": b'{"weight": 1}',
    }
    for path, content in bodies.items():
        headers = {"content-type": given} if given else {}
        answer = await running.client.post(path, content=content, headers=headers)
        assert answer.status_code in {415, 422}, path
    accepted = await running.client.post(
        "/trial/parcels", content=b'{"weight": 1}', headers={"content-type": "application/json; charset=utf-8"}
    )
    assert accepted.status_code == 200


async def test_the_hash_of_an_api_key_is_not_accepted_as_a_key(address: str) -> None:
    """The settings contain only hashes, and a hash gives no access."""
    _, line = make_key("reader", "read")
    async with service(address, api_keys=line) as running:
        for stolen in (line, line.split(":")[2]):
            is_problem(await running.client.get("/metrics", headers={"x-api-key": stolen}), "unauthorized")


async def test_production_shows_no_schema_and_sends_hsts(address: str) -> None:
    _, line = make_key("reader", "read")
    async with service(address, environment="production", api_keys=line, migrate_on_start=True) as running:
        for path in ("/openapi.json", "/docs", "/redoc"):
            is_problem(await running.client.get(path), "not-found")
        answer = await running.client.get("/health/live")
        assert answer.headers["strict-transport-security"].startswith("max-age=")


# -- metrics ----------------------------------------------------------------------------------------------------------


async def test_metrics_show_link_pool_leader_and_requests(running: Running) -> None:
    async def leads() -> str | None:
        text = (await running.client.get("/metrics")).text
        return text if "flotilla_leader 1.0" in text else None

    text = await soon(leads)
    assert "flotilla_link_up 1.0" in text
    assert "flotilla_pool_up 1.0" in text
    assert "flotilla_requests_in_flight 1.0" in text
    assert 'flotilla_pool_connections{state="idle"}' in text


async def test_every_defined_metric_has_a_value_and_nothing_else_does(running: Running) -> None:
    assert values(running.context).keys() == {each.name for each in DEFINITIONS}
