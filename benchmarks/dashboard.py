"""The pages of the dashboard beside many runs and instances, and what its viewers cost the database and the engine.

pages         The server has 50 instances, a million pending and ten million finished runs, of which one in a hundred
              has failed with one of fifty errors. One more instance, in this process, is asked for each page again
              and again; before each request it forgets what it has read for other viewers. So each request reads
              everything that the page shows.
statements    Viewers of one of the 50 instances, each with one of the pages open, which its script fetches every
              two seconds. The server logs all statements; what it logs without viewers is subtracted.
throughput    A burn-down as in `throughput.py`, in turns: without viewers, with 50 viewers of the process that
              executes the runs, and with 50 viewers of an instance of role `web`.
"""

import asyncio
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvloop

from app.fleet.dashboard.frame import page, shared_reads
from benchmarks.conditions import ACTIONS, durable_server, start_in_waves
from benchmarks.report import distribution, rates, verdict
from benchmarks.throughput import burn_down
from tests.instances.test_cost import CONFIGURATION, statements
from tests.support.browser import chromium, visitor
from tests.support.fleet import Fleet
from tests.support.postgres import Postgres
from tests.support.service import service

INSTANCES, PENDING, FINISHED, REQUESTS = 50, 1_000_000, 10_000_000, 200
VIEWERS = (1, 10, 50)
SETTLED, WATCHED = 10.0, 30.0
MAX_PAGE_MS, MAX_PAINT_MS, MAX_STATEMENTS, MIN_SHARE = 100, 300, 5.0, 0.97
PAINTED, PAINTS = ("/dashboard", "/dashboard/actions", "/dashboard/charts"), 20
FIRST_PAINT = "performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)"
ROUNDS, RUNS = 5, 500_000
EVERY = 2.0
ALONE = "without viewers"

FILL_PENDING = """
INSERT INTO flotilla.runs (action_id, priority, run_at, max_attempts, trigger)
SELECT a.id, 0, now(), 4, 'code'
FROM flotilla.actions AS a, generate_series(1, %(rows)s)
WHERE a.name = 'linger-quietly'
"""
FILL_FINISHED = """
INSERT INTO flotilla.finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, error, events, created_at,
    started_at, finished_at, expires_at
)
SELECT nextval('flotilla.runs_id_seq'), a.ids[1 + n %% cardinality(a.ids)],
       CASE WHEN n %% 100 = 0 THEN 'failed' WHEN n %% 500 = 1 THEN 'cancelled' ELSE 'succeeded' END,
       0, at, 1, 'flotilla-1', 1, 4, 'code',
       CASE WHEN n %% 100 = 0 THEN 'ValueError: parcel ' || n || ' lacks ' || repeat('x', (n / 100 %% 50)::int) END, 3,
       at, at, at, now() + interval '7 days'
FROM (SELECT array_agg(id ORDER BY id) AS ids FROM flotilla.actions) AS a, generate_series(1, %(rows)s) AS n,
     LATERAL (SELECT now() - (%(rows)s - n) * interval '1 s' * 86400 / %(rows)s AS at) AS t
"""
EXAMPLES = """
SELECT (SELECT max(id) FROM flotilla.finished_runs), f.id, a.name, f.alike
FROM flotilla.finished_runs AS f
JOIN flotilla.actions AS a ON a.id = f.action_id
WHERE f.alike IS NOT NULL
ORDER BY f.id DESC
LIMIT 1
"""


def run(*, short: bool) -> None:
    instances, pending, finished, requests = (2, 1000, 10_000, 5) if short else (INSTANCES, PENDING, FINISHED, REQUESTS)
    settled, watched = (1.0, 3.0) if short else (SETTLED, WATCHED)
    with (
        durable_server(CONFIGURATION) as postgres,
        tempfile.TemporaryDirectory() as folder,
        Fleet(postgres.address_of(), Path(folder), FLOTILLA_ACTIONS=ACTIONS, FLOTILLA_CONCURRENCY="2") as fleet,
    ):
        started = start_in_waves(fleet, instances)
        began = time.monotonic()
        paths = fill(postgres, pending, finished)
        print(
            f"{pending:,} pending and {finished:,} finished runs after {time.monotonic() - began:.0f} s\n", flush=True
        )
        time.sleep(settled)
        for path, seconds in uvloop.run(time_pages(postgres.address_of(), paths, requests)).items():
            print(distribution(path, seconds, bound_ms=MAX_PAGE_MS))
        for path, seconds in first_paints(started[0].url, 1 if short else PAINTS).items():
            print(distribution(f"paint {path}", seconds, bound_ms=MAX_PAINT_MS))
        print()
        # The page that asks before a change is not fetched again.
        open_pages = [path.replace("{id}", given) for path, given in paths.items() if "/changes/" not in path]
        alone = statements_per_second(postgres, watched)
        print(f"{'statements a second, without viewers':<46} {alone:8.2f}")
        for viewers in VIEWERS:
            with watching(started[0].url, open_pages, viewers):
                time.sleep(settled)
                more = statements_per_second(postgres, watched) - alone
            kept = verdict(more <= MAX_STATEMENTS)
            print(
                f"{f'more of them with {viewers} viewers':<46} {more:8.2f}   ≤ {MAX_STATEMENTS:.0f}/s: {kept}",
                flush=True,
            )
    compare_throughput(1 if short else ROUNDS, 2000 if short else RUNS)


def fill(postgres: Postgres, pending: int, finished: int) -> dict[str, str]:
    """Insert the runs; return the pages, and for those of one run its id."""
    with postgres.session() as session:
        session.execute(FILL_FINISHED, {"rows": finished})
        session.execute(FILL_PENDING, {"rows": pending})
        session.execute("VACUUM ANALYZE")
        session.execute("CHECKPOINT")
        row = session.execute(EXAMPLES).fetchone()
    assert row is not None
    newest, failed, action, alike = row
    group = f"action={action}&alike={alike}"
    plain = (
        "", "/actions", f"/actions/{action}", "/runs", "/runs?state=failed", f"/runs?action={action}&state=succeeded",
        f"/runs?{group}", "/runs?words=lacks+xxx", "/runs?ordering_key=none", "/errors", f"/changes/retry?{group}",
        "/coordination", "/charts", "/charts?span=day",
    )  # fmt: skip
    return {
        **{f"/dashboard{path}": "" for path in plain},
        "/dashboard/runs/{id}": str(failed),
        "/dashboard/runs/{id}?": str(newest),
    }


async def time_pages(address: str, paths: dict[str, str], requests: int) -> dict[str, list[float]]:
    """Return the seconds of each request for each page."""
    measured: dict[str, list[float]] = {path: [] for path in paths}
    # A page that takes too long is measured, and not cut.
    page.TIME_LIMIT = shared_reads.TIMEOUT = 60.0
    async with service(address, actions=(ACTIONS,), log_level="warning", role="web") as running:
        for number in range(requests):
            for path, given in paths.items():
                if number:
                    running.app.state.dashboard.forget()
                began = time.perf_counter()
                answer = await running.client.get(path.replace("{id}", given))
                seconds = time.perf_counter() - began
                if answer.status_code != 200:
                    raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
                measured[path].append(seconds)
    return measured


def first_paints(url: str, times: int) -> dict[str, list[float]]:
    """Return the seconds until each page is painted, each time by a browser that has nothing in its cache."""
    if shutil.which("chromium") is None:
        print("paint: SKIPPED, Chromium is not installed; `make tools` installs it")
        return {}
    measured: dict[str, list[float]] = {path: [] for path in PAINTED}
    with chromium() as browser:
        for _ in range(times):
            for path in PAINTED:
                with visitor(browser, url) as tab:
                    tab.goto(path)
                    while not (found := tab.evaluate(FIRST_PAINT)):
                        tab.wait_for_timeout(20)
                    measured[path].append(found[0] / 1000)
    return measured


def statements_per_second(postgres: Postgres, seconds: float) -> float:
    before, began = statements(postgres.log).total(), time.monotonic()
    time.sleep(seconds)
    return (statements(postgres.log).total() - before) / (time.monotonic() - began)


# -- viewers ----------------------------------------------------------------------------------------------------------


@contextmanager
def watching(url: str, paths: Sequence[str], viewers: int) -> Iterator[None]:
    """Let so many viewers look at the pages for the duration of the block."""
    loop = uvloop.new_event_loop()
    failures: list[BaseException] = []

    def work() -> None:
        tasks = [loop.create_task(view(url, paths[number % len(paths)])) for number in range(viewers)]
        tasks += [loop.create_task(until_stopped())]
        done, _ = loop.run_until_complete(asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED))
        failures.extend(error for each in done if (error := each.exception()))
        for each in tasks:
            each.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()

    stop = asyncio.Event()

    async def until_stopped() -> None:
        await stop.wait()

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join()
    if failures:
        raise failures[0]


async def view(url: str, path: str) -> None:
    """Fetch a page again and again, as its script does, over one connection."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    await asyncio.sleep(EVERY * random.random())
    reader, writer = await asyncio.open_connection(host, port)
    try:
        while True:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: text/html\r\n\r\n".encode())
            head = await reader.readuntil(b"\r\n\r\n")
            # On a busy machine, a page may be too slow; its script tries again, too.
            if not head.startswith((b"HTTP/1.1 200", b"HTTP/1.1 503")):
                raise RuntimeError(f"{path}: {head.splitlines()[0].decode()}")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            await asyncio.sleep(EVERY)
    finally:
        writer.close()


# -- the throughput ---------------------------------------------------------------------------------------------------


def compare_throughput(rounds: int, runs: int) -> None:
    with durable_server() as postgres, ExitStack() as stack:
        address = postgres.new_database()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        options: dict[str, Any] = {"FLOTILLA_ACTIONS": ACTIONS, "FLOTILLA_CONCURRENCY": "2000"}
        fleet = stack.enter_context(Fleet(address, folder, **options, FLOTILLA_LOG_LEVEL="warning"))
        (worker,), (web,) = fleet.start(), fleet.start(FLOTILLA_ROLE="web")
        pages = [f"/dashboard{path}" for path in ("", "/actions", "/actions/noop", "/runs", "/errors", "/charts")]

        def measure(url: str | None) -> float:
            if url is None:
                return burn_down(postgres, address, worker, runs)
            with watching(url, pages, max(VIEWERS)):
                return burn_down(postgres, address, worker, runs)

        subjects: dict[str, Callable[[], float]] = {
            ALONE: lambda: measure(None),
            "50 viewers of the same process": lambda: measure(worker.url),
            "50 viewers of an instance of role web": lambda: measure(web.url),
        }
        measured: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name, each in subjects.items():
                measured[name].append(each())
    print(f"\n{'':<46} runs/s in each of {rounds} rounds")
    alone = statistics.median(measured[ALONE])
    for name, figures in measured.items():
        share = statistics.median(figures) / alone
        print(f"{rates(name, figures)}   × {share:.3f}   ≥ {MIN_SHARE}: {verdict(share >= MIN_SHARE)}", flush=True)
