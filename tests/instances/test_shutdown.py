"""The ordered shutdown, as clients observe it and as the row records it, for each way to run the service."""

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

STEPS = ["flag", "drain", "scheduler", "executor", "resources", "unlink", "pool"]
SINGLE_PROCESS: list[Mode] = ["serve", "uvicorn"]
ALL_MODES: list[Mode] = ["serve", "uvicorn", "workers"]


def accepts_connections(instance: InstanceProcess) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex(("127.0.0.1", instance.port)) == 0


def read_shutdown_records(address: str) -> dict[str, list[dict[str, Any]]]:
    """Return the recorded shutdowns of the gone instances, by name."""
    with psycopg.connect(address) as session:
        rows = session.execute("SELECT name, shutdown FROM flotilla.instances WHERE state = 'gone'").fetchall()
    return dict(rows)


def in_background(work: Callable[[], httpx.Response]) -> "threading.Thread":
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_readiness_probe_returns_503_while_the_listener_still_accepts(fleet: Fleet, mode: Mode) -> None:
    # Long enough for several probes on a busy machine.
    (instance,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="6")
    instance.terminate()
    seen: list[int | None] = []
    while accepts_connections(instance):
        seen.append(instance.status())
        time.sleep(0.05)
    instance.wait_exit()

    answered = [status for status in seen if status is not None]
    assert set(answered) <= {200, 503}
    # One worker may receive the signal a moment before the other.
    last = "".join(str(status) for status in answered).rpartition("200")[2]
    assert last.count("503") >= 2, seen
    if mode != "workers":
        assert answered == sorted(answered), "the instance never becomes ready again"


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_request_in_flight_finishes_and_new_ones_are_served_until_the_listener_closes(
    fleet: Fleet, mode: Mode
) -> None:
    # The requests take longer than the listener is open, and there is time for one more request before it closes.
    (instance,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="8", FLOTILLA_DRAIN_TIMEOUT="20")
    with ThreadPoolExecutor() as pool:
        requests = [pool.submit(httpx.get, f"{instance.url}/trial/slow?seconds=9", timeout=60) for _ in range(4)]
        eventually(lambda: len(instance.lines("trial.began")) == 4)
        instance.terminate()
        eventually(lambda: instance.status() == 503)
        late = httpx.get(f"{instance.url}/trial/slow?seconds=0", timeout=30)
        answers = [each.result() for each in requests]
    instance.wait_exit()

    assert late.status_code == 200
    assert [answer.status_code for answer in answers] == [200] * 4
    assert instance.errors() == []


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_stream_of_events_ends_cleanly_with_a_reconnection_delay(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode)
    with httpx.stream("GET", f"{instance.url}/trial/events", timeout=30) as stream:
        received = b""
        for chunk in stream.iter_bytes():
            received += chunk
            if received.count(b"data:") == 3:
                instance.terminate()
    # No exception was raised: the response had a proper end.
    instance.wait_exit()

    lines = received.decode().strip().splitlines()
    assert lines[-1].startswith("retry: ")
    assert 500 <= int(lines[-1].removeprefix("retry: ")) <= 3000
    assert instance.errors() == []


def test_a_download_in_flight_is_completed(fleet: Fleet) -> None:
    (instance,) = fleet.start(FLOTILLA_DRAIN_TIMEOUT="20")
    with httpx.stream("GET", f"{instance.url}/trial/download?seconds=2", timeout=30) as download:
        chunks = download.iter_raw()
        size = len(next(chunks))
        instance.terminate()
        size += sum(len(chunk) for chunk in chunks)
    assert size == 2000
    assert instance.wait_exit() is not None
    assert instance.errors() == []


@pytest.mark.parametrize("mode", ALL_MODES)
def test_the_steps_of_a_shutdown_are_in_order_logged_and_stored_in_the_row(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode)
    expected = 2 if mode == "workers" else 1
    eventually(lambda: len(instance.lines("instance.ready")) == expected)
    instance.terminate()
    instance.wait_exit()

    kept = read_shutdown_records(fleet.address)
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


@pytest.mark.parametrize("mode", SINGLE_PROCESS)
def test_a_draining_leader_gives_up_leadership_at_the_first_step(fleet: Fleet, mode: Mode) -> None:
    (first,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="30")
    (second,) = fleet.start(1, mode)
    eventually(lambda: second.instances()["leader"] == first.me()["name"])
    first.terminate()

    eventually(lambda: second.instances()["leader"] == second.me()["name"])
    draining = {each["name"]: each["state"] for each in second.instances()["instances"]}
    assert sorted(draining.values()) == ["draining", "ready"]
    # A second signal skips the rest of the wait.
    first.terminate()
    first.wait_exit()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_second_signal_skips_the_wait(fleet: Fleet, mode: Mode, number: int) -> None:
    # So long that a process that waited for it would not end in time.
    (instance,) = fleet.start(1, mode, FLOTILLA_DRAIN_DELAY="600", FLOTILLA_GRACE_PERIOD="700")
    expected = 2 if mode == "workers" else 1
    eventually(lambda: len(instance.lines("instance.ready")) == expected)
    processes = [each["pid"] for each in instance.instances()["instances"]]
    instance.signal(number)
    eventually(lambda: len(instance.lines("shutdown.step")) == expected and instance.status() == 503)
    # The parent process of uvicorn passes on only the first signal, so the workers receive the second one directly.
    for process in processes:
        os.kill(process, number)

    instance.wait_exit()
    kept = read_shutdown_records(fleet.address)
    assert len(kept) == expected
    for record in kept.values():
        assert [entry["step"] for entry in record] == STEPS
        assert {entry["outcome"] for entry in record} == {"done"}


@pytest.mark.parametrize("mode", SINGLE_PROCESS)
def test_down_requests_an_ordered_shutdown_through_the_database(fleet: Fleet, mode: Mode) -> None:
    instance, other = fleet.start(2, mode)
    name = instance.me()["name"]
    down = run("down", name, address=fleet.address)

    assert down.returncode == 0, down.stderr
    assert f"{name}: gone" in down.stdout
    instance.wait_exit()
    assert [entry["step"] for entry in read_shutdown_records(fleet.address)[name]] == STEPS
    other.wait_ready()
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


@pytest.mark.parametrize("mode", ALL_MODES)
def test_a_step_that_hangs_is_cut_at_its_limit_and_the_other_steps_are_done(
    hanging: Callable[..., Hanging], address: str, mode: Mode
) -> None:
    instance = hanging(mode, FLOTILLA_PAUSE_TIMEOUT="1")
    eventually(lambda: len(instance.lines("instance.ready")) == (2 if mode == "workers" else 1))
    instance.terminate()
    instance.wait_exit()

    for record in read_shutdown_records(address).values():
        assert [entry["step"] for entry in record] == STEPS
        outcomes = {entry["step"]: entry["outcome"] for entry in record}
        assert outcomes == dict.fromkeys(STEPS, "done") | {"executor": "cut"}
        cut = next(entry for entry in record if entry["step"] == "executor")
        assert cut["ms"] >= 900
    assert {line["step"] for line in instance.lines("shutdown.step") if line["outcome"] == "cut"} == {"executor"}


def end_with_in_flight(fleet: Fleet, path: str) -> InstanceProcess:
    """Shut an instance down while a request is in flight that would never end by itself."""
    (instance,) = fleet.start(1, "uvicorn", FLOTILLA_DRAIN_TIMEOUT="1")
    requests = in_background(lambda: get_or_599(instance.url + path))
    eventually(lambda: "flotilla_requests_in_flight 2.0" in instance.client.get("/metrics").text)
    instance.client.close()
    instance.terminate()
    instance.wait_exit()
    requests.join()
    return instance


def test_requests_that_never_end_are_cut_and_the_shutdown_is_completed(fleet: Fleet) -> None:
    """Plain uvicorn would wait for these requests without end, and never run the end of the lifespan."""
    end_with_in_flight(fleet, "/trial/slow?seconds=3600")
    (record,) = read_shutdown_records(fleet.address).values()
    assert [entry["step"] for entry in record] == STEPS
    assert record[-1]["outcome"] == "done"


def test_a_cancelled_request_can_use_the_database_until_its_cleanup_has_ended(fleet: Fleet) -> None:
    """uvicorn no longer counts requests that it has cancelled; the pool stays open while the service counts them."""
    end_with_in_flight(fleet, "/trial/tidy")
    with psycopg.connect(fleet.address) as session:
        assert session.execute("SELECT to_regclass('public.tidied')").fetchone() != (None,)


def get_or_599(url: str) -> httpx.Response:
    try:
        return httpx.get(url, timeout=60)
    except httpx.TransportError:
        return httpx.Response(599)


def test_the_watchdog_ends_a_process_whose_event_loop_is_blocked(fleet: Fleet) -> None:
    """The event loop is blocked without end: no further step is possible, and the log still has the reason."""
    short = {"FLOTILLA_DRAIN_TIMEOUT": "1", "FLOTILLA_PAUSE_TIMEOUT": "1", "FLOTILLA_GRACE_PERIOD": "30"}
    # The listener is open long enough for one more request.
    (instance,) = fleet.start(1, "uvicorn", FLOTILLA_DRAIN_DELAY="8", **short)
    instance.terminate()
    # The first step is done, and the second one lasts as long as the listener is open.
    eventually(lambda: [line["step"] for line in instance.lines("shutdown.step")] == ["flag"])
    with blocked(instance, seconds=600):
        assert instance.wait_exit() == 70
    (line,) = instance.lines("shutdown.watchdog")
    assert line["step"] == "drain"


@pytest.mark.parametrize("mode", SINGLE_PROCESS)
def test_a_singleton_that_does_not_end_does_not_delay_the_end_of_the_process(fleet: Fleet, mode: Mode) -> None:
    """After Ctrl-C, Python waits for all tasks; a SIGTERM ends the process without waiting."""
    (instance,) = fleet.start(1, mode, FLOTILLA_ACTIONS="tests.support.trial_deaf")
    eventually(lambda: instance.lines("singleton.began"))
    instance.signal(signal.SIGINT)
    # Before the watchdog would end it.
    instance.wait_exit(within=40)
    assert instance.lines("singleton.abandoned")
    for steps in read_shutdown_records(fleet.address).values():
        assert [step["outcome"] for step in steps] == ["done"] * len(STEPS)


def test_no_session_is_left_after_an_ordered_shutdown(fleet: Fleet, postgres: Postgres) -> None:
    instances = fleet.start(2)
    for instance in instances:
        instance.terminate()
    for instance in instances:
        instance.wait_exit()
    with postgres.session() as session:
        name = fleet.address.rpartition("/")[2]
        left = "SELECT count(*) FROM pg_stat_activity WHERE datname = %s"
        eventually(lambda: session.execute(left, [name]).fetchone() == (0,))


def test_an_unreachable_database_does_not_delay_the_shutdown(own_postgres: Postgres, tmp_path: Path) -> None:
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
def test_a_reload_during_development_does_not_wait_for_load_balancers(
    address: str, tmp_path: Path, command: list[str]
) -> None:
    # The first command is that of docs/guides/develop.md.
    """After a change of a file, the old process ends at once, and a new one becomes ready."""
    watched = tmp_path / "watched"
    watched.mkdir()
    (watched / "anything.py").write_text("")
    log = tmp_path / "reload.log"
    port = free_port()
    # So long that a process that waited for it would not be replaced in time.
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
        eventually(lambda: get_or_599(f"http://127.0.0.1:{port}/health/ready").status_code == 200)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


class FirstProcess(InstanceProcess):
    """An instance that is process 1, as in a container: signals without a handler have no effect on it."""

    def _command(self, mode: Mode) -> list[str]:
        return [process_namespaces(), "--pid", "--fork", "--kill-child", *super()._command(mode)]

    def terminate(self) -> None:
        (inner,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        os.kill(int(inner), signal.SIGTERM)


def test_the_watchdog_ends_a_process_that_still_exists_after_its_shutdown(fleet: Fleet, tmp_path: Path) -> None:
    short = {"FLOTILLA_DRAIN_DELAY": "0", "FLOTILLA_DRAIN_TIMEOUT": "1", "FLOTILLA_PAUSE_TIMEOUT": "1"}
    instance = FirstProcess("uvicorn", fleet.address, tmp_path / "first.log", short | {"FLOTILLA_GRACE_PERIOD": "22"})
    fleet.instances.append(instance)
    instance.wait_ready()
    stuck = in_background(lambda: get_or_599(f"{instance.url}/trial/stuck"))
    eventually(lambda: "flotilla_requests_in_flight 2.0" in instance.client.get("/metrics").text)
    instance.client.close()
    instance.terminate()

    assert instance.wait_exit() == 70
    assert instance.lines("shutdown.finished")
    (line,) = instance.lines("shutdown.watchdog")
    assert line["step"] == "exit"
    stuck.join()
