"""The reader of streams of `docs/guides/follow-runs.md` in a browser, with API keys."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, Route

from app.fleet.api_keys import make_key
from tests.support.browser import chromium, visitor
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.guides import follow_js, program
from tests.support.postgres import eventually
from tests.support.proxy import Proxy

pytestmark = pytest.mark.template

OPERATE, READ = make_key("operator", "operate"), make_key("page", "read")
# Starts to read a stream: `received` has its events and the time of each, `over` becomes null at its end, or the error.
FOLLOW = """([url, key]) => {
  window.received = [];
  const read = async () => {
    for await (const { event, data } of follow(url, key)) received.push({ event, data, at: performance.now() });
    return null;
  };
  window.over = read().catch((error) => [error.message, error.cause.status]);
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as own:
        yield own


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    keys = f"{OPERATE[1]},{READ[1]}"
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions", FLOTILLA_API_KEYS=keys) as own:
        yield own


def read_stream(page: Page, url: str, key: str = READ[0]) -> None:
    # A page of the service that needs no key.
    page.goto("/problems")
    page.add_script_tag(content=follow_js())
    page.evaluate(FOLLOW, [url, key])


def start(fleet: Fleet, role: str) -> InstanceProcess:
    (instance,) = fleet.start(FLOTILLA_ROLE=role)
    instance.client.headers["authorization"] = f"Bearer {OPERATE[0]}"
    return instance


def test_a_stream_goes_on_at_another_instance_when_its_own_is_killed(fleet: Fleet, browser: Browser) -> None:
    """A proxy, like a load balancer, leads the same address to another instance."""
    first, second = start(fleet, "web"), start(fleet, "all")
    run_id = second.trigger("chatter", {"count": 60, "pause": 0.05})["id"]
    resumed: list[str | None] = []

    def note(request: Request) -> None:
        if request.url.endswith("/events"):
            resumed.append(request.headers.get("last-event-id"))

    with Proxy(("127.0.0.1", first.port)) as proxy, visitor(browser, f"http://127.0.0.1:{proxy.port}") as page:
        page.on("request", note)
        read_stream(page, f"/runs/{run_id}/events")
        page.wait_for_function("received.length > 10")
        proxy.target = ("127.0.0.1", second.port)
        first.kill()
        assert page.evaluate("over") is None
        received = page.evaluate("received")
    events = [each["data"] for each in received]
    assert [each["seq"] for each in events] == list(range(1, 64)), "every event once, in order"
    assert [each["data"]["state"] for each in events if each["kind"] == "state"] == ["pending", "running", "succeeded"]
    assert resumed[0] is None
    assert int(resumed[-1] or 0) > 10, "it went on after the last event that it had received"


def test_the_reader_waits_as_the_stream_and_the_service_say_and_stops_at_done(fleet: Fleet, browser: Browser) -> None:
    """The answers of the service are played, because a real one chooses the times at random."""
    played: list[dict[str, Any]] = [
        {"body": 'id: 7\nevent: state\ndata: {"n": 1}\n\nretry: 1500\n\n'},
        {"status": 503, "headers": {"retry-after": "2"}, "body": "no JSON"},
        {"body": ': ping\n\nevent: note\ndata: {"text": "a: b"}\nid: 8\n\nevent: done\ndata: {"run": 1}\n\n'},
    ]
    asked: list[dict[str, str]] = []

    def play(route: Route) -> None:
        asked.append(route.request.headers)
        route.fulfill(content_type="text/event-stream", **played[len(asked) - 1])

    with visitor(browser, start(fleet, "web").url) as page:
        page.route(re.compile("/played$"), play)
        read_stream(page, "/played")
        assert page.evaluate("over") is None
        received = page.evaluate("received")
    assert [(each["event"], each["data"]) for each in received] == [("state", {"n": 1}), ("note", {"text": "a: b"})]
    assert received[1]["at"] - received[0]["at"] >= 3490, "1.5 s by `retry`, and 2 s by `Retry-After`"
    assert [each.get("last-event-id") for each in asked] == [None, "7", "7"]


def test_an_unknown_key_or_unknown_run_ends_the_reader_with_the_problem(fleet: Fleet, browser: Browser) -> None:
    with visitor(browser, start(fleet, "web").url) as page:
        for key, said, status in (("unknown", "this API key is unknown", 401), (READ[0], "there is no run 1", 404)):
            read_stream(page, "/runs/1/events", key)
            text, answered = page.evaluate("over")
            assert text.startswith(said)
            assert answered == status


def test_leaving_the_loop_closes_the_connection(fleet: Fleet, browser: Browser) -> None:
    instance = start(fleet, "all")
    run_id = instance.trigger("chatter", {"count": 1000})["id"]
    with visitor(browser, instance.url) as page:
        page.goto("/problems")
        page.add_script_tag(content=follow_js())
        first = "async ([url, key]) => { for await (const { event } of follow(url, key)) return event; }"
        assert page.evaluate(first, [f"/runs/{run_id}/events", READ[0]]) == "state"
        eventually(lambda: "flotilla_streams 0.0" in instance.client.get("/metrics").text)


# What a page does with the events of the guide's examples.
SHOW = "window.shown = []; window.show = (...event) => shown.push(event); window.key = 'none';"


@pytest.fixture
def instance(address: str, tmp_path: Path) -> Iterator[InstanceProcess]:
    """An instance without keys: an EventSource cannot send one."""
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions") as own:
        (started,) = own.start()
        yield started


def test_the_event_source_of_the_guide_shows_each_event_until_the_end(
    instance: InstanceProcess, browser: Browser
) -> None:
    run_id = instance.trigger("chatter", {"count": 3, "pause": 0.01})["id"]
    with visitor(browser, instance.url) as page:
        page.goto("/problems")
        page.evaluate(SHOW)
        page.add_script_tag(content=program("follow-runs", "js", "new EventSource("))
        page.evaluate("run => follow(run)", run_id)
        eventually(lambda: page.evaluate("shown.at(-1)?.[0].data.state") == "succeeded")
        states = [event for (event,) in page.evaluate("shown") if event["kind"] == "state"]
        assert [event["data"]["state"] for event in states] == ["pending", "running", "succeeded"]


def test_the_loop_of_the_guide_shows_each_event_and_ends(instance: InstanceProcess, browser: Browser) -> None:
    run_id = instance.trigger("chatter", {"count": 3, "pause": 0.01})["id"]
    loop = program("follow-runs", "js", "for await (const { event, data } of follow(").replace("17", str(run_id), 1)
    with visitor(browser, instance.url) as page:
        page.goto("/problems")
        page.evaluate(SHOW)
        page.add_script_tag(content=follow_js())
        page.evaluate(f"async () => {{ {loop} }}")
        shown = page.evaluate("shown")
        assert [event for event, _ in shown][:2] == ["state", "state"]
        assert shown[-1][1]["data"]["state"] == "succeeded"
