"""The ordered shutdown, seen from outside and read from the record, under each way to run the service."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.support.fleet import ROOT, Fleet, InstanceProcess, Mode, blocked, environment, run
from tests.support.postgres import Postgres, eventually, free_port
from tests.support.tools import process_namespaces

STEPS = ["flag", "drain", "scheduler", "executor", "unlink", "pool"]
ALONE: list[Mode] = ["serve", "uvicorn"]
EVERY: list[Mode] = ["serve", "uvicorn", "workers"]


def listening(instance: InstanceProcess) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", instance.port)) == 0


def records(address: str) -> dict[str, list[dict[str, Any]]]:
    """What the rows of the gone say of their shutdowns."""
    with psycopg.connect(address) as session:
        rows = session.execute("SELECT name, shutdown FROM flotilla.instances WHERE state = 'gone'").fetchall()
    return dict(rows)


def in_background(work: Callable[[], httpx.Response]) -> "threading.Thread":
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", EVERY)
def test_ready_says_503_while_the_listener_still_accepts(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="3")
    instance.terminate()
    seen: list[int | None] = []
    while listening(instance):
        seen.append(instance.status())
        time.sleep(0.05)
    instance.wait_exit()

    answered = [status for status in seen if status is not None]
    assert set(answered) <= {200, 503}
    # One worker may be told a moment before the other.
    last = "".join(str(status) for status in answered).rpartition("200")[2]
    assert last.count("503") >= 2, seen
    if mode != "workers":
        assert answered == sorted(answered), "never again ready"


@pytest.mark.parametrize("mode", EVERY)
def test_a_request_in_flight_finishes_and_new_ones_are_served_until_the_listener_closes(
    fleet: Fleet, mode: Mode
) -> None:
    # Longer than the listener is open, and with time enough for one more request while it is.
    (instance,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="4", FLOTILLA_DRAIN_TIMEOUT="20")
    with ThreadPoolExecutor() as pool:
        flying = [pool.submit(httpx.get, f"{instance.url}/trial/slow?seconds=5", timeout=60) for _ in range(4)]
        eventually(lambda: len(instance.lines("trial.began")) == 4)
        instance.terminate()
        eventually(lambda: instance.status() == 503)
        late = httpx.get(f"{instance.url}/trial/slow?seconds=0", timeout=30)
        answers = [each.result() for each in flying]
    instance.wait_exit()

    assert late.status_code == 200
    assert [answer.status_code for answer in answers] == [200] * 4
    assert instance.errors() == []


@pytest.mark.parametrize("mode", EVERY)
def test_a_stream_of_events_is_ended_cleanly_and_told_to_come_back(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode)
    with httpx.stream("GET", f"{instance.url}/trial/events", timeout=30) as stream:
        received = b""
        for chunk in stream.iter_bytes():
            received += chunk
            if received.count(b"data:") == 3:
                instance.terminate()
    # No exception: the response had a proper end.
    instance.wait_exit()

    lines = received.decode().strip().splitlines()
    assert lines[-1].startswith("retry: ")
    assert 500 <= int(lines[-1].removeprefix("retry: ")) <= 3000
    assert instance.errors() == []


def test_a_download_in_flight_is_left_to_finish(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    with httpx.stream("GET", f"{instance.url}/trial/download?seconds=2", timeout=30) as download:
        chunks = download.iter_raw()
        size = len(next(chunks))
        instance.terminate()
        size += sum(len(chunk) for chunk in chunks)
    assert size == 2000
    assert instance.wait_exit() is not None
    assert instance.errors() == []


@pytest.mark.parametrize("mode", EVERY)
def test_the_steps_are_taken_in_order_logged_and_kept_in_the_row(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode)
    expected = 2 if mode == "workers" else 1
    eventually(lambda: len(instance.lines("instance.ready")) == expected)
    instance.terminate()
    instance.wait_exit()

    kept = records(fleet.address)
    assert len(kept) == expected
    for name, record in kept.items():
        assert [entry["step"] for entry in record] == STEPS
        assert {entry["outcome"] for entry in record} == {"done"}
        assert all(entry["ms"] >= 0 for entry in record)
        drain = next(entry for entry in record if entry["step"] == "drain")
        assert drain["ms"] >= 300, "the drain delay was not kept"
        logged = [line for line in instance.lines("shutdown.step") if line["instance"] == name]
        assert [line["step"] for line in logged] == STEPS
        assert [line["ms"] for line in logged] == [entry["ms"] for entry in record]
    assert len(instance.lines("shutdown.finished")) == expected
    assert instance.errors() == []


@pytest.mark.parametrize("mode", ALONE)
def test_leadership_is_handed_on_at_the_flag_and_not_at_the_end(fleet: Fleet, mode: Mode) -> None:
    (first,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="30")
    (second,) = fleet.start(1, mode)
    eventually(lambda: second.instances()["leader"] == first.me()["name"])
    first.terminate()

    eventually(lambda: second.instances()["leader"] == second.me()["name"])
    draining = {each["name"]: each["state"] for each in second.instances()["instances"]}
    assert sorted(draining.values()) == ["draining", "ready"]
    # A second signal: it need not wait any longer.
    first.terminate()
    first.wait_exit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", EVERY)
def test_a_second_signal_skips_the_wait(fleet: Fleet, mode: Mode, number: int) -> None:
    (instance,) = fleet.start(
        1, mode, FLOTILLA_DRAIN_DELAY="30", FLOTILLA_DRAIN_TIMEOUT="5", FLOTILLA_PAUSE_TIMEOUT="2"
    )
    expected = 2 if mode == "workers" else 1
    eventually(lambda: len(instance.lines("instance.ready")) == expected)
    processes = [each["pid"] for each in instance.instances()["instances"]]
    instance.signal(number)
    eventually(lambda: len(instance.lines("shutdown.step")) == expected and instance.status() == 503)
    # uvicorn's parent passes one signal on and no second: the workers themselves are told.
    for process in processes:
        os.kill(process, number)

    instance.wait_exit(within=15)
    kept = records(fleet.address)
    assert len(kept) == expected
    for record in kept.values():
        assert [entry["step"] for entry in record] == STEPS
        assert {entry["outcome"] for entry in record} == {"done"}


@pytest.mark.parametrize("mode", ALONE)
def test_down_asks_an_instance_through_the_database_and_it_leaves_in_order(fleet: Fleet, mode: Mode) -> None:
    instance, other = fleet.start(2, mode)
    name = instance.me()["name"]
    asked = run("down", name, address=fleet.address)

    assert asked.returncode == 0, asked.stderr
    assert f"{name}: gone" in asked.stdout
    instance.wait_exit()
    assert [entry["step"] for entry in records(fleet.address)[name]] == STEPS
    assert other.is_ready()
    assert instance.errors() == []


def test_down_works_even_when_its_notification_is_lost(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    with psycopg.connect(fleet.address) as session:
        session.execute("UPDATE flotilla.instances SET drain_requested_at = clock_timestamp()")
    instance.wait_exit()


PATCH = """
import asyncio
from app.fleet.engine.execute.executor import Executor

async def hang(self):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass  # the worst kind

Executor._stop = hang
from tests.support import trial_routes
"""
RUN = "import hanging; from app.fleet.cli import main; main()"


class Hanging(InstanceProcess):
    """An instance whose executor never stops."""

    def _command(self, mode: Mode) -> list[str]:
        self.log.with_name("hanging.py").write_text(PATCH)
        self.log.with_name("hanging_app.py").write_text("import hanging\nfrom app.main import app\n")
        port = ["--port", str(self.port)]
        if mode == "serve":
            return [sys.executable, "-c", RUN, "serve", *port]
        workers = ["--workers", "2"] if mode == "workers" else []
        return [sys.executable, "-m", "uvicorn", "hanging_app:app", *port, *workers]


@pytest.fixture
def hanging(address: str, tmp_path: Path) -> Iterator[Callable[..., Hanging]]:
    instances: list[Hanging] = []

    def start(mode: Mode, **env: str) -> Hanging:
        folder = {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
        instances.append(Hanging(mode, address, tmp_path / "hanging.log", folder | env))
        return instances[-1].wait_ready()

    yield start
    for instance in instances:
        instance.end()


@pytest.mark.parametrize("mode", EVERY)
def test_a_step_that_hangs_is_cut_at_its_limit_and_the_others_still_happen(
    hanging: Callable[..., Hanging], address: str, mode: Mode
) -> None:
    instance = hanging(mode, FLOTILLA_PAUSE_TIMEOUT="1")
    eventually(lambda: len(instance.lines("instance.ready")) == (2 if mode == "workers" else 1))
    instance.terminate()
    instance.wait_exit()

    for record in records(address).values():
        assert [entry["step"] for entry in record] == STEPS
        outcomes = {entry["step"]: entry["outcome"] for entry in record}
        assert outcomes == dict.fromkeys(STEPS, "done") | {"executor": "cut"}
        cut = next(entry for entry in record if entry["step"] == "executor")
        assert cut["ms"] >= 900
    assert {line["step"] for line in instance.lines("shutdown.step") if line["outcome"] == "cut"} == {"executor"}


def end_with_in_flight(fleet: Fleet, path: str) -> InstanceProcess:
    """Run an instance to its end while a request is in flight that would never end by itself."""
    (instance,) = fleet.start(1, "uvicorn", FLOTILLA_DRAIN_TIMEOUT="1")
    flying = in_background(lambda: swallow(instance.url + path))
    eventually(lambda: "flotilla_requests_in_flight 2.0" in instance.client.get("/metrics").text)
    instance.client.close()
    instance.terminate()
    instance.wait_exit()
    flying.join()
    return instance


def test_requests_that_never_end_are_cut_and_the_rest_of_the_shutdown_happens(fleet: Fleet) -> None:
    """Plain uvicorn would wait for them for ever, and never run the lifespan's end."""
    end_with_in_flight(fleet, "/trial/slow?seconds=3600")
    (record,) = records(fleet.address).values()
    assert [entry["step"] for entry in record] == STEPS
    assert record[-1]["outcome"] == "done"


def test_a_cancelled_request_has_the_database_until_it_has_tidied_up(fleet: Fleet) -> None:
    """uvicorn cancels what is over its limit and forgets it; the pool stays open for as long as our own count says."""
    end_with_in_flight(fleet, "/trial/tidy")
    with psycopg.connect(fleet.address) as session:
        assert session.execute("SELECT to_regclass('public.tidied')").fetchone() != (None,)


def swallow(url: str) -> httpx.Response:
    try:
        return httpx.get(url, timeout=60)
    except httpx.TransportError:
        return httpx.Response(599)


def test_the_watchdog_ends_a_process_that_cannot_end_itself(fleet: Fleet) -> None:
    """The event loop is blocked for good: no step can be taken any more, and the log still says why."""
    short = {"FLOTILLA_DRAIN_TIMEOUT": "1", "FLOTILLA_PAUSE_TIMEOUT": "1", "FLOTILLA_GRACE_PERIOD": "23"}
    # The listener is open for long enough to let one more request in.
    (instance,) = fleet.start(1, "uvicorn", FLOTILLA_DRAIN_DELAY="4", **short)
    instance.terminate()
    # The first step is done, and the next one goes on for as long as the listener is open.
    eventually(lambda: [line["step"] for line in instance.lines("shutdown.step")] == ["flag"])
    with blocked(instance, seconds=600):
        assert instance.wait_exit() == 70
    (line,) = instance.lines("shutdown.watchdog")
    assert line["step"] == "drain"


@pytest.mark.parametrize("mode", ALONE)
def test_a_singleton_that_does_not_end_holds_up_no_process(fleet: Fleet, mode: Mode) -> None:
    """At Ctrl-C, after which all tasks are waited for; a SIGTERM ends the process with no more ado."""
    (instance,) = fleet.start(1, mode, FLOTILLA_ACTIONS="tests.support.trial_deaf")
    eventually(lambda: instance.lines("singleton.began"))
    instance.signal(signal.SIGINT)
    instance.wait_exit(within=20)
    assert instance.lines("singleton.abandoned")
    for steps in records(fleet.address).values():
        assert [step["outcome"] for step in steps] == ["done"] * len(STEPS)


def test_nothing_is_left_in_the_database_after_an_orderly_end(fleet: Fleet, postgres: Postgres) -> None:
    instances = fleet.start(2)
    for instance in instances:
        instance.terminate()
    for instance in instances:
        instance.wait_exit()
    with postgres.session() as session:
        name = fleet.address.rpartition("/")[2]
        left = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        eventually(lambda: session.execute(left, [name]).fetchone() == (0,))


def test_an_unreachable_database_does_not_hold_up_the_end(own_postgres: Postgres, tmp_path: Path) -> None:
    with Fleet(own_postgres.address_of(), tmp_path) as fleet:
        (instance,) = fleet.start()
        own_postgres.stop("immediate")
        eventually(lambda: instance.status() == 503)
        instance.terminate()
        instance.wait_exit(within=20)
        assert [line["step"] for line in instance.lines("shutdown.step")] == STEPS


@pytest.mark.parametrize(
    "command",
    [["uvicorn", "app.main:app", "--reload"], ["fastapi", "dev"]],
    ids=["uvicorn --reload", "fastapi dev"],
)
def test_a_reload_at_a_desk_does_not_wait_for_load_balancers(address: str, tmp_path: Path, command: list[str]) -> None:
    """The daily loop: a change ends the old process at once, and the new one is ready."""
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "anything.py").write_text("")
    log = tmp_path / "reload.log"
    port = free_port()
    # So long that no process that waited for it would be replaced in time.
    env = {"FLOTILLA_DRAIN_DELAY": "600", "FLOTILLA_GRACE_PERIOD": "700", "PYTHONWARNINGS": "default"}
    with log.open("wb") as target:
        process = subprocess.Popen(
            [sys.executable, "-m", *command, "--port", str(port), "--reload-dir", str(watched)],
            cwd=ROOT,
            env=environment(address, env),
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: log.read_text().count('"instance.ready"') == 1, within=60)
        (watched / "anything.py").write_text("changed = True\n")
        eventually(lambda: log.read_text().count('"instance.ready"') == 2, within=60)
        eventually(lambda: swallow(f"http://127.0.0.1:{port}/health/ready").status_code == 200)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


class FirstProcess(InstanceProcess):
    """An instance that is process 1, as in a container: signals without a handler do nothing to it."""

    def _command(self, mode: Mode) -> list[str]:
        return [process_namespaces(), "--pid", "--fork", "--kill-child", *super()._command(mode)]

    def terminate(self) -> None:
        (inner,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)


def test_the_watchdog_ends_a_process_that_is_still_there_after_its_shutdown(fleet: Fleet, tmp_path: Path) -> None:
    short = {"FLOTILLA_DRAIN_DELAY": "0", "FLOTILLA_DRAIN_TIMEOUT": "1", "FLOTILLA_PAUSE_TIMEOUT": "1"}
    instance = FirstProcess("uvicorn", fleet.address, tmp_path / "first.log", short | {"FLOTILLA_GRACE_PERIOD": "19"})
    fleet.instances.append(instance)
    instance.wait_ready()
    stuck = in_background(lambda: swallow(f"{instance.url}/trial/stuck"))
    eventually(lambda: "flotilla_requests_in_flight 2.0" in instance.client.get("/metrics").text)
    instance.client.close()
    instance.terminate()

    assert instance.wait_exit() == 70
    assert instance.lines("shutdown.finished")
    (line,) = instance.lines("shutdown.watchdog")
    assert line["step"] == "exit"
    stuck.join()
