"""Debian's Chromium without a window, driven by Playwright. An error in the console of a page fails its test.

A response with an error status is not an error of the page: on a busy machine a page may be 503 for a moment, and then
comes back by itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, sync_playwright

from tests.support.tools import program

# Without privileges of the kernel, without a graphics card, and without requests of its own.
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]
# Milliseconds. It detects hangs: on a busy machine a page takes seconds.
BOUND = 60_000


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program("chromium"), args=OPTIONS)
        yield browser
        browser.close()


@contextmanager
def visitor(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page in a new session; at the end, no error and no violation of a policy may be in its console."""
    context: BrowserContext = browser.new_context(base_url=url, **options)
    context.set_default_timeout(BOUND)
    problems: list[str] = []

    def note(message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"} and not message.text.startswith("Failed to load resource"):
            problems.append(message.text)

    def note_error(error: Error) -> None:
        problems.append(str(error))

    page = context.new_page()
    page.on("console", note)
    page.on("pageerror", note_error)
    yield page
    context.close()
    assert problems == []
