"""The failed attempts of a run in a browser: what a viewer has opened stays open while new ones come."""

from pathlib import Path

import httpx
from playwright.sync_api import expect

from tests.support.browser import BOUND, chromium, visitor
from tests.support.fleet import Fleet

expect.set_options(timeout=BOUND)


def test_what_a_viewer_has_opened_stays_open_while_new_attempts_fail(address: str, tmp_path: Path) -> None:
    with (
        Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions") as fleet,
        chromium() as browser,
    ):
        (instance,) = fleet.start()
        run_id = instance.ended(instance.trigger("fail")["id"])["id"]
        with visitor(browser, instance.url) as page:
            page.goto(f"/dashboard/runs/{run_id}")
            first, third = page.locator("#attempt-1"), page.locator("#attempt-3")
            expect(third).to_have_attribute("open", "")
            third.locator("summary").click()
            first.locator("summary").click()
            expect(first.locator("pre")).to_be_visible()
            page.evaluate("window.notLoadedAgain = true")
            httpx.post(f"{instance.url}/runs/{run_id}/retry").raise_for_status()
            expect(page.locator("#attempt-6 pre")).to_be_visible()
            expect(page.locator("details[id^=attempt]")).to_have_count(6)
            expect(first.locator("pre")).to_be_visible()
            expect(third.locator("pre")).not_to_be_visible()
            assert page.evaluate("window.notLoadedAgain") is True
