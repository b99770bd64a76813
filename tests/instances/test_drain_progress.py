"""The steps of an ordered shutdown while they happen, as other instances show them; and a drain without a database."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psycopg

from app.fleet.lifespan import RECORD_LIMIT
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.proxy import Proxy

LONG = {"FLOTILLA_DRAIN_TIMEOUT": "600", "FLOTILLA_GRACE_PERIOD": "700"}


@contextmanager
def slow_request(instance: InstanceProcess) -> Iterator[None]:
    """Have a request in flight that does not end before the instance does."""

    def ask() -> None:
        with suppress(httpx.TransportError):
            httpx.get(f"{instance.url}/trial/slow?seconds=3600", timeout=3600)

    asking = threading.Thread(target=ask)
    asking.start()
    eventually(lambda: instance.lines("trial.began"))
    try:
        yield
    finally:
        instance.kill()
        asking.join()


def steps(fleet: Fleet, name: str) -> list[tuple[str, str]]:
    """Return the steps in the row of an instance, with their outcomes."""
    with psycopg.connect(fleet.address) as session:
        row = session.execute("SELECT shutdown FROM flotilla.instances WHERE name = %s", [name]).fetchone()
    assert row is not None
    return [(each["step"], each["outcome"]) for each in row[0] or []]


def row_of(other: InstanceProcess, name: str, after: str = "Living instances") -> str:
    """Return the text of the instance's row on another instance's page, below the caption `after`."""
    html = other.client.get("/dashboard").text.partition(after)[2]
    found = re.search(rf"<tr>\s*<td>{re.escape(name)}</td>.*?</tr>", html, re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", found[0]).split()) if found else ""


def through(proxy: Proxy, name: str) -> str:
    return f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}"


def test_another_instance_shows_which_step_of_a_drain_runs_and_for_how_long(fleet: Fleet) -> None:
    instance, other = fleet.start(2, "serve", **LONG)
    name = instance.me()["name"]
    assert steps(fleet, name) == []
    with slow_request(instance):
        instance.terminate()
        eventually(lambda: steps(fleet, name) == [("flag", "done"), ("drain", "running")])

        def running_for(least: float) -> bool:
            shown = re.search(r"draining : flag done [\d.]+ m?s, drain running for ([\d.]+) s ", row_of(other, name))
            return shown is not None and float(shown[1]) >= least

        eventually(lambda: running_for(1.0))
        eventually(lambda: running_for(3.0))
    # It was killed during the step, and its row keeps that.
    eventually(lambda: "drain began" in row_of(other, name, "Gone within"))
    assert steps(fleet, name) == [("flag", "done"), ("drain", "running")]


def test_a_database_that_stops_answering_during_a_drain_delays_no_step(
    postgres: Postgres, address: str, tmp_path: Path
) -> None:
    """What passes is dropped without an error: a step that waited for a statement would wait until its time limit."""
    name = address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy, Fleet(through(proxy, name), tmp_path) as fleet:
        (instance,) = fleet.start(FLOTILLA_DRAIN_DELAY="3")
        instance.terminate()
        eventually(lambda: len(instance.lines("shutdown.step")) == 1)
        proxy.swallow()
        instance.wait_exit()
        logged: list[dict[str, Any]] = instance.lines("shutdown.step")
        assert [each["step"] for each in logged] == [
            "flag",
            "drain",
            "scheduler",
            "executor",
            "resources",
            "unlink",
            "pool",
        ]
        (finished,) = instance.lines("shutdown.finished")
        between = finished["seconds"] - sum(each["ms"] for each in logged) / 1000
        assert between < RECORD_LIMIT + 1, "no time passes between the steps, except to write the final record"
        assert not instance.lines("shutdown.watchdog")
