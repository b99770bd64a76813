"""The dashboard in a browser: an operator looks at three instances, and acts on them."""

import re
from collections.abc import Iterator
from html import unescape
from importlib.resources import files
from pathlib import Path

import psycopg
import pytest
from playwright.sync_api import Browser, Dialog, Page, expect

from app.fleet.api_keys import make_key
from tests.support.browser import BOUND, chromium, visitor
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import eventually

TRIAL = "tests.support.trial_actions"
READ, ADMIN = make_key("bob", "read"), make_key("root", "admin")
KEYS = f"{READ[1]},{ADMIN[1]}"
PAGES = ("", "/actions", "/actions/weigh", "/runs", "/errors", "/coordination", "/charts", "/charts?span=day")
AXE = files("axe_playwright_python").joinpath("axe.min.js").read_text()
HELD = """
INSERT INTO flotilla.service_locks (name, token, instance_id, instance, hostname, pid, ttl, acquired_at, renewed_at,
                                    expires_at)
SELECT %s, 1, id, name, hostname, pid, '1 h', now(), now(), now() + interval '1 h' FROM flotilla.instances
"""
PHONE = {"width": 375, "height": 700}

expect.set_options(timeout=BOUND)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as own:
        yield own


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL) as own:
        yield own


def accept(dialogs: list[str], page: Page) -> None:
    """Accept every question, and keep its text."""

    def answer(dialog: Dialog) -> None:
        dialogs.append(dialog.message)
        dialog.accept()

    page.on("dialog", answer)


def sign_in(page: Page, key: str) -> None:
    page.goto("/dashboard/sign-in")
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("heading", name="Fleet")).to_be_visible()


def check_accessibility(page: Page) -> None:
    page.evaluate(AXE)
    found = page.evaluate(
        "async () => (await axe.run()).violations.map(each => [each.id, each.nodes.map(n => n.html)])"
    )
    assert found == [], page.url


def ended(fleet: Fleet) -> dict[str, int]:
    """Return how many runs have ended, by state."""
    with psycopg.connect(fleet.address) as connection:
        rows = connection.execute("SELECT state, count(*) FROM flotilla.finished_runs GROUP BY state").fetchall()
    return dict(rows)


def test_a_run_is_triggered_by_the_form_and_watched_to_its_end(fleet: Fleet, browser: Browser) -> None:
    instance = fleet.start(3)[0]
    with visitor(browser, instance.url) as page:
        page.goto("/dashboard/actions/nap")
        page.get_by_label("Payload").fill('{"seconds": 3}')
        # The page asks its instance to say when the run has new events.
        with page.expect_request(re.compile(r"/dashboard/runs/\d+/events\?after=\d+$")):
            page.get_by_role("button", name="Trigger nap").click()
        expect(page).to_have_url(re.compile(r"/dashboard/runs/\d+$"))
        page.evaluate("window.notLoadedAgain = true")
        expect(page.locator("main .state").first).to_have_text("succeeded")
        expect(page.locator("#result + pre")).to_have_text('"rested"')
        assert page.evaluate("window.notLoadedAgain") is True, "the script has changed the page in place"


def test_a_takeover_appears_in_the_timeline(fleet: Fleet, browser: Browser) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    (first,) = fleet.start(FLOTILLA_ROLE="worker")
    run_id = web.trigger("sleep-once")["id"]
    eventually(lambda: web.run(run_id)["state"] == "running")
    (second,) = fleet.start(FLOTILLA_ROLE="worker")
    names = [first.me()["name"], second.me()["name"]]
    with visitor(browser, web.url) as page:
        page.goto(f"/dashboard/runs/{run_id}")
        lanes = page.locator(".timeline tbody th")
        expect(lanes).to_have_text(["waiting", names[0]])
        first.kill()
        expect(lanes).to_have_text(["waiting", *names])
        expect(page.locator("main .state").first).to_have_text("succeeded")
        expect(page.locator(".timeline rect.pending title")).to_contain_text(f"attempt 1 on {names[0]}")
        expect(page.locator(".timeline rect.succeeded title")).to_contain_text(f"attempt 2 on {names[1]}")
        page.goto("/dashboard")
        expect(page.get_by_role("cell", name="was declared gone")).to_have_count(1)


def test_an_action_is_paused_after_a_question_and_resumed(fleet: Fleet, browser: Browser) -> None:
    instance = fleet.start(3)[0]
    asked: list[str] = []
    with visitor(browser, instance.url) as page:
        accept(asked, page)
        page.goto("/dashboard/actions/echo")
        page.get_by_role("button", name="Pause", exact=True).click()
        expect(page.locator("main .state").first).to_have_text("paused")
        assert asked == ["No run of echo is scheduled or begun until it is resumed. Running runs go on."]
        page.get_by_role("button", name="Resume").click()
        expect(page.locator("main .state").first).to_have_text("active")


def test_what_somebody_types_survives_the_updates(fleet: Fleet, browser: Browser) -> None:
    (instance,) = fleet.start()
    with visitor(browser, instance.url) as page:
        page.goto("/dashboard/actions/echo")
        field = page.get_by_label("Payload")
        field.fill('{"half": ')
        run_id = instance.trigger("echo")["id"]
        # The new run appears with an update.
        expect(page.get_by_role("link", name=str(run_id), exact=True)).to_be_visible()
        expect(field).to_have_value('{"half": ')
        expect(field).to_be_focused()


def test_the_sign_in_takes_a_key_and_its_scope_decides(address: str, tmp_path: Path, browser: Browser) -> None:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, FLOTILLA_API_KEYS=KEYS) as fleet:
        # Without the key, `is_ready` is all that the test can ask them over HTTP.
        one, other, _ = fleet.start(3)
        with visitor(browser, one.url) as page:
            page.goto("/dashboard/runs?state=failed")
            page.get_by_label("API key").fill("wrong")
            page.get_by_role("button", name="Sign in").click()
            expect(page.get_by_role("alert")).to_contain_text("unknown")
            page.get_by_label("API key").fill(READ[0])
            page.get_by_role("button", name="Sign in").click()
            expect(page).to_have_url(re.compile("/dashboard/runs.state=failed$"))
            page.goto("/dashboard/actions/echo")
            expect(page.get_by_role("button", name="Sign out")).to_be_visible()
            expect(page.locator("main").get_by_role("button")).to_have_count(0)
            # A form that was made by hand: the instance refuses it, whatever the page shows.
            token = page.locator("[name=token]").first.input_value()
            answer = page.request.post("/dashboard/actions/echo/pause", form={"token": token})
            assert answer.status == 403
            assert "you have signed in with 'read'" in unescape(answer.text())
            # The cookie counts at the other instance too: cookies do not depend on the port.
            page.goto(f"{other.url}/dashboard")
            expect(page.get_by_role("heading", name="Fleet")).to_be_visible()


def test_a_form_on_another_site_changes_nothing(address: str, tmp_path: Path, browser: Browser) -> None:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, FLOTILLA_API_KEYS=KEYS) as fleet:
        (instance,) = fleet.start()
        with visitor(browser, instance.url) as page:
            sign_in(page, ADMIN[0])
            # The same host with another name is another site; its page knows the address, and no token.
            form = f"""<form method="post" action="{instance.url}/dashboard/actions/echo/pause">
            <input name="token" value="{"0" * 32}"><button>Win</button></form>"""
            page.route("http://elsewhere.test/", lambda route: route.fulfill(content_type="text/html", body=form))
            page.goto("http://elsewhere.test/")
            page.get_by_role("button", name="Win").click()
            # The cookie is not sent with a form of another site, so this leads to the sign-in, or is refused.
            expect(page.get_by_role("heading", level=1)).to_have_text(re.compile("Sign in|Forbidden"))
            page.goto("/dashboard/actions/echo")
            expect(page.locator("main .state").first).to_have_text("active")


def test_a_bad_deploy_is_one_line_and_two_clicks_retry_it(fleet: Fleet, browser: Browser, tmp_path: Path) -> None:
    one, other, _ = fleet.start(3)
    mended = tmp_path / "mended"
    for _ in range(5):
        one.trigger_all([{"action": "deliver", "payload": {"mended": str(mended)}}] * 1000)
    eventually(lambda: ended(fleet) == {"failed": 5000})
    mended.touch()
    with visitor(browser, other.url) as page:
        page.goto("/dashboard/errors")
        expect(page.locator("main tbody tr")).to_have_count(1)
        expect(page.locator("main tbody tr")).to_contain_text("1,000+")
        page.get_by_role("link", name="Retry all").click()
        expect(page.locator("main")).to_contain_text("1,000+ runs of deliver with the same error.")
        page.get_by_role("button", name="Retry 1,000+ runs").click()
        expect(page.get_by_role("status").first).to_have_text("5,000 runs of deliver are pending again.")
    eventually(lambda: ended(fleet) == {"succeeded": 5000})


def test_a_lock_is_released_with_a_reason(fleet: Fleet, browser: Browser) -> None:
    instance = fleet.start(3)[0]
    run_id = instance.trigger("hold-lock")["id"]
    asked: list[str] = []
    with visitor(browser, instance.url) as page:
        accept(asked, page)
        page.goto("/dashboard/coordination")
        expect(page.get_by_role("cell", name="trial", exact=True)).to_be_visible()
        page.get_by_label("Why trial is released").fill("its holder hangs")
        page.get_by_role("button", name="Release").click()
        expect(page.get_by_role("cell", name="trial", exact=True)).to_have_count(0)
        assert "loses the lock trial at once" in asked[0]
    assert instance.ended(run_id)["result"] == "another held it"


def test_the_reason_that_somebody_types_for_a_lock_does_not_become_that_of_another(
    fleet: Fleet, browser: Browser
) -> None:
    (instance,) = fleet.start()
    with visitor(browser, instance.url) as page, psycopg.connect(fleet.address, autocommit=True) as session:
        for name in ("first", "second"):
            session.execute(HELD, [name])
        page.goto("/dashboard/coordination")
        page.get_by_label("Why first is released").fill("its holder hangs")
        session.execute("DELETE FROM flotilla.service_locks WHERE name = 'first'")
        expect(page.get_by_role("cell", name="first", exact=True)).to_have_count(0)
        expect(page.get_by_label("Why second is released")).to_have_value("")


def test_a_run_is_cancelled(fleet: Fleet, browser: Browser) -> None:
    instance, other, _ = fleet.start(3)
    run_id = instance.trigger("nap", {"seconds": 3600})["id"]
    eventually(lambda: instance.run(run_id)["state"] == "running")
    with visitor(browser, other.url) as page:
        accept([], page)
        page.goto(f"/dashboard/runs/{run_id}")
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("main .state").first).to_have_text("cancelled")


def test_the_page_moves_to_another_instance_when_its_own_ends(fleet: Fleet, browser: Browser) -> None:
    instances = fleet.start(3)
    with visitor(browser, instances[0].url) as page:
        page.goto("/dashboard/actions")
        instances[0].terminate()
        others = "|".join(re.escape(each.url) for each in instances[1:])
        expect(page).to_have_url(re.compile(rf"({others})/dashboard/actions$"))
        expect(page.get_by_role("heading", name="Actions")).to_be_visible()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_has_an_obstacle(address: str, tmp_path: Path, browser: Browser, theme: str) -> None:
    """All rules of axe-core, on every page with something on it, and on the sign-in and an error."""
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, FLOTILLA_API_KEYS=KEYS) as fleet:
        (instance,) = fleet.start()
        with visitor(browser, instance.url, color_scheme=theme) as page:
            page.goto("/dashboard/sign-in")
            check_accessibility(page)
            sign_in(page, ADMIN[0])
            for name in ("echo", "fail", "hold-lock"):
                page.goto(f"/dashboard/actions/{name}")
                page.get_by_role("button", name="Trigger").click()
                expect(page).to_have_url(re.compile(r"/dashboard/runs/\d+$"))
            page.goto("/dashboard/runs/2")
            expect(page.locator("main .state").first).to_have_text("failed")
            check_accessibility(page)
            preview = "/changes/retry?action=fail&state=failed"
            for path in (*PAGES, "/actions/echo", "/runs/1", "/runs/3", preview, "/runs/99", "/runs?words=no"):
                page.goto(f"/dashboard{path}")
                check_accessibility(page)
            page.goto(f"/dashboard{preview}")
            page.get_by_role("button", name="Retry 1 run").click()
            check_accessibility(page)


def test_every_page_works_without_the_script(fleet: Fleet, browser: Browser) -> None:
    (instance,) = fleet.start()
    with visitor(browser, instance.url, java_script_enabled=False) as page:
        for path in PAGES:
            page.goto(f"/dashboard{path}")
            expect(page.get_by_role("navigation")).to_be_visible()
        page.goto("/dashboard/actions/echo")
        page.get_by_role("button", name="Trigger echo").click()
        expect(page).to_have_url(re.compile(r"/dashboard/runs/\d+$"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_page_scrolls_sideways_on_a_phone(fleet: Fleet, browser: Browser, theme: str) -> None:
    (instance,) = fleet.start()
    for name in ("echo", "give-up"):
        instance.ended(instance.trigger(name)["id"])
    with visitor(browser, instance.url, viewport=PHONE, color_scheme=theme) as page:
        for path in (*PAGES, "/runs/1"):
            page.goto(f"/dashboard{path}")
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path


def test_the_keyboard_leads_through_the_pages(fleet: Fleet, browser: Browser) -> None:
    instance: InstanceProcess = fleet.start()[0]
    newest = [instance.trigger("echo")["id"] for _ in range(2)][-1]
    helped: list[str] = []
    with visitor(browser, instance.url) as page:
        accept(helped, page)
        page.goto("/dashboard")
        page.keyboard.press("g")
        page.keyboard.press("r")
        expect(page.get_by_role("heading", name="Runs")).to_be_visible()
        expect(page.get_by_role("link", name=str(newest), exact=True)).to_be_visible()
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        expect(page).to_have_url(re.compile(rf"/dashboard/runs/{newest}$"))
        page.keyboard.press("?")
        assert "g f, g a, g r" in helped[0]
