"""The charts in a browser: they are brought up to date in place, and fit on a phone."""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import BOUND, chromium, visitor
from tests.support.fleet import Fleet

TRIAL = "tests.support.trial_actions"
PHONE = {"width": 375, "height": 700}

expect.set_options(timeout=BOUND)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as own:
        yield own


def test_charts_are_reached_by_the_keyboard_and_what_was_opened_stays_open(
    address: str, tmp_path: Path, browser: Browser
) -> None:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL) as fleet, psycopg.connect(address, autocommit=True) as sql:
        (instance,) = fleet.start()
        insert = (
            "INSERT INTO flotilla.run_minutes (minute, action_id, succeeded, begun, waited_seconds) "
            "SELECT date_trunc('minute', now()) - make_interval(mins => n), id, 1204, 1, 2 "
            "FROM flotilla.actions, generate_series(%s::int, %s) AS n WHERE name = 'echo'"
        )
        sql.execute(insert, (40, 40))
        with visitor(browser, instance.url, viewport=PHONE) as page:
            page.goto("/dashboard/actions")
            expect(page.get_by_role("img", name="1,204 succeeded")).to_be_visible()
            page.keyboard.press("g")
            page.keyboard.press("c")
            expect(page.get_by_role("heading", name="Attempts")).to_be_visible()
            expect(page.get_by_role("img", name="1,204 succeeded. Most in a minute: 1,204")).to_be_visible()
            page.get_by_text("The same as a table").click()
            expect(page.get_by_role("cell", name="1,204")).to_have_count(1)
            sql.execute(insert, (20, 21))
            expect(page.get_by_role("cell", name="1,204")).to_have_count(3)
            expect(page.get_by_role("cell", name="1,204").first).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
