"""Pages of other origins: those that are allowed use the service in a browser, the others do not."""

from collections.abc import AsyncIterator

import httpx
import pytest

from app.fleet.api_keys import make_key
from tests.integration.test_edge import is_problem
from tests.support.runs import LocalInstance
from tests.support.service import Running, service

pytestmark = pytest.mark.anyio

PAGE, OTHER = "https://app.example", "https://evil.example"
KEY, LINE = make_key("page", "operate")


@pytest.fixture
async def running(address: str) -> AsyncIterator[Running]:
    given = {"actions": ("tests.support.trial_actions",), "max_body": 2000, "api_keys": LINE}
    async with service(address, cors_origins=f"{PAGE},http://localhost:5173", **given) as own:
        yield own


async def preflight(running: Running, path: str, method: str, headers: str = "", origin: str = PAGE) -> httpx.Response:
    asked = {"origin": origin, "access-control-request-method": method}
    return await running.client.options(
        path, headers=asked | ({"access-control-request-headers": headers} if headers else {})
    )


def allowed(answer: httpx.Response) -> str | None:
    """Return the origin whose pages may read the answer."""
    assert "access-control-allow-credentials" not in answer.headers
    assert "Origin" in answer.headers["vary"]
    origin: str | None = answer.headers.get("access-control-allow-origin")
    return origin


async def test_a_preflight_is_answered_without_a_key_for_an_allowed_origin(running: Running) -> None:
    sent = "authorization, idempotency-key, last-event-id, x-request-id, x-api-key, content-type, x-of-the-service"
    for path in ("/actions/echo/runs", "/runs/1", "/trial/parcels"):
        for method in ("GET", "POST", "DELETE", "PUT", "PATCH"):
            answer = await preflight(running, path, method, sent)
            assert (answer.status_code, allowed(answer)) == (200, PAGE)
            assert method in answer.headers["access-control-allow-methods"]
            assert answer.headers["access-control-allow-headers"] == sent
            assert answer.headers["x-request-id"]


async def test_a_preflight_of_another_origin_is_refused(running: Running) -> None:
    for origin in (OTHER, "null", "http://app.example", "https://app.example.evil.example", "https://app.example:444"):
        answer = await preflight(running, "/actions", "GET", origin=origin)
        assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (400, None)


async def test_an_allowed_page_reads_answers_problems_and_streams(running: Running) -> None:
    own = {"origin": PAGE, "x-api-key": KEY}
    made = await running.client.post("/actions/echo/runs", json={"payload": {"a": 1}}, headers=own)
    assert (made.status_code, allowed(made)) == (202, PAGE)
    assert {"Location", "Retry-After", "X-Request-Id"} <= set(made.headers["access-control-expose-headers"].split(", "))
    run_id = made.json()["id"]
    await LocalInstance(running).ended(run_id)
    stream = await running.client.get(f"/runs/{run_id}/events", headers=own)
    assert (stream.status_code, allowed(stream)) == (200, PAGE)
    # From the edge, from a dependency, from a route, from the framework, from a route that raises.
    for answer, slug in (
        (await running.client.post("/trial/parcels", content=b"x" * 3000, headers=own), "payload-too-large"),
        (await running.client.get("/actions", headers={"origin": PAGE}), "unauthorized"),
        (await running.client.get("/runs/4711", headers=own), "not-found"),
        (await running.client.get("/nowhere", headers=own), "not-found"),
        (await running.client.get("/trial/fail", headers=own), "internal"),
    ):
        is_problem(answer, slug)
        assert allowed(answer) == PAGE


async def test_another_page_reads_nothing_and_programs_are_served_as_before(running: Running) -> None:
    foreign = await running.client.get("/health/live", headers={"origin": OTHER})
    assert (foreign.status_code, allowed(foreign)) == (200, None)
    assert (await running.client.get("/actions", headers={"x-api-key": KEY})).status_code == 200


async def test_without_keys_an_allowed_page_may_change_something_and_another_page_may_not(address: str) -> None:
    async with service(address, cors_origins=PAGE) as running:
        for headers, status in (
            ({"origin": PAGE, "sec-fetch-site": "cross-site"}, 200),
            ({"origin": OTHER, "sec-fetch-site": "cross-site"}, 403),
            ({"sec-fetch-site": "cross-site"}, 403),
        ):
            assert (await running.client.post("/trial/once/a", headers=headers)).status_code == status


async def test_every_origin_may_read_if_all_are_allowed_and_changes_nothing_without_a_key(address: str) -> None:
    async with service(address, cors_origins="*") as running:
        answer = await running.client.get("/actions", headers={"origin": OTHER})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        foreign = {"origin": OTHER, "sec-fetch-site": "cross-site"}
        is_problem(await running.client.post("/trial/once/a", headers=foreign), "forbidden")


async def test_without_the_setting_no_page_of_another_origin_is_allowed(address: str) -> None:
    async with service(address) as running:
        answer = await running.client.get("/health/live", headers={"origin": PAGE})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        is_problem(await preflight(running, "/actions", "GET"), "method-not-allowed")
