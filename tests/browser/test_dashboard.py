"""The dashboard in a browser: an operator looks at three instances, and acts on them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Dialog, Page, expect

from app.fleet.api_keys import make_key
from tests.support.browser import BOUND, chromium, visitor
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import eventually

TRIAL = "tests.support.trial_actions"
READ, ADMIN = make_key("bob", "read"), make_key("root", "admin")
KEYS = f"{READ[1]},{ADMIN[1]}"
PAGES = ("", "/actions", "/actions/weigh", "/runs", "/coordination")
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


def test_a_run_is_triggered_by_the_form_and_watched_to_its_end(fleet: Fleet, browser: Browser) -> None:
    instance = fleet.start(3)[0]
    with visitor(browser, instance.url) as page:
        page.goto("/dashboard/actions/nap")
        page.get_by_label("Payload").fill('{"seconds": 3}')
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
    (instance,) = fleet.start()
    asked: list[str] = []
    with visitor(browser, instance.url) as page:
        accept(asked, page)
        page.goto("/dashboard/actions/echo")
        page.get_by_role("button", name="Pause").click()
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
        one, other = fleet.start(2)
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
            expect(page.get_by_role("button", name="Pause")).to_have_count(0)
            # The cookie counts at the other instance too: cookies do not depend on the port.
            page.goto(f"{other.url}/dashboard")
            expect(page.get_by_role("heading", name="Fleet")).to_be_visible()


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
        assert "g f, g a, g r, g o" in helped[0]
