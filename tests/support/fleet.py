"""Real instances of the service, as processes that a test starts, observes, stops, freezes and kills.

Each process logs to a file and has its own environment. Processes that a test leaves running are killed at its end.
"""

import contextlib
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal, Self, TypeAlias

import httpx

from tests.support.fork_server import ForkServer, Launched, plain_environment
from tests.support.postgres import BOUND, eventually, free_port

ROOT = Path(__file__).resolve().parents[2]
Mode = Literal["serve", "uvicorn", "workers"]
# Nothing here uses TLS, so no certificate is trusted. By default, each client would first read all certificates of the
# machine, which takes 40 ms.
NO_TRUST = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
# Short limits for the steps of the shutdown, to keep tests short. Their order is the same.
QUICK = {"FLOTILLA_DRAIN_DELAY": "0.3", "FLOTILLA_DRAIN_TIMEOUT": "5", "FLOTILLA_PAUSE_TIMEOUT": "2"}


Process: TypeAlias = "subprocess.Popen[bytes] | Launched"
# Set by tests. Benchmarks have none, because they measure instances as a user starts them.
fork_server: ForkServer | None = None


class InstanceProcess:
    """One instance as a process (with `workers`, a parent process and its children)."""

    def __init__(
        self,
        mode: Mode,
        address: str,
        log: Path,
        env: Mapping[str, str],
        port: int | None = None,
        workers: int = 2,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.mode = mode
        self._workers = workers
        self.client = httpx.Client(base_url=self.url, timeout=30, verify=NO_TRUST)
        if mode == "workers":
            # uvicorn's parent process does not close its listening socket.
            env = {"PYTHONWARNINGS": "error,ignore::ResourceWarning", **env}
        with log.open("wb") as target:
            self.process = start(
                self._command(mode), environment(address, env), target, plain=ForkServer.can_launch(env)
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def status(self, path: str = "/health/ready", timeout: float = 5) -> int | None:
        """Return the status of a request on a new connection; None without an answer."""
        try:
            return httpx.get(self.url + path, timeout=timeout, verify=NO_TRUST).status_code
        except httpx.TransportError:
            return None

    def is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the process ended with {self.process.returncode}:\n{self.text}")
        return self.status() == 200

    def wait_ready(self) -> Self:
        eventually(self.is_ready)
        if self.mode == "workers":
            # One worker has answered; the others must be ready too.
            eventually(lambda: len(self.lines("instance.ready")) == self._workers)
        return self

    def instances(self) -> dict[str, Any]:
        answer = self.client.get("/health/instances")
        assert answer.status_code == 200, answer.text
        view: dict[str, Any] = answer.json()
        return view

    def me(self) -> dict[str, Any]:
        """Return this instance's entry of its own view. Not for `workers`, where any worker may answer."""
        view = self.instances()
        return next(each for each in view["instances"] if each["name"] == view["self"] and each["state"] != "gone")

    def trigger(self, action: str, payload: object = None, **order: Any) -> dict[str, Any]:
        """Trigger a run, and return it as answered."""
        body = {"payload": {} if payload is None else payload, **order}
        answer = self.client.post(f"/actions/{action}/runs", json=body)
        assert answer.status_code in {200, 202}, answer.text
        run: dict[str, Any] = answer.json()
        return run

    def trigger_all(self, runs: Sequence[Mapping[str, Any]]) -> list[int]:
        answer = self.client.post("/runs:batch", json={"runs": runs})
        assert answer.status_code == 202, answer.text
        return [run["id"] for run in answer.json()["runs"]]

    def run(self, run_id: int) -> dict[str, Any]:
        answer = self.client.get(f"/runs/{run_id}")
        assert answer.status_code == 200, answer.text
        run: dict[str, Any] = answer.json()
        return run

    def ended(self, run_id: int, within: float = BOUND) -> dict[str, Any]:
        """Wait until a run has ended, and return it."""

        def ended_run() -> dict[str, Any] | None:
            run = self.run(run_id)
            return run if run["finished_at"] else None

        return eventually(ended_run, within=within)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def freeze(self) -> None:
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    def wait_exit(self, within: float = BOUND) -> int:
        return self.process.wait(within)

    def lines(self, event: str) -> list[dict[str, Any]]:
        """Return the log lines with this event. Needs `FLOTILLA_LOG_FORMAT=json`, the default here."""
        found = []
        for line in self.text.splitlines():
            if line.startswith("{"):
                with contextlib.suppress(json.JSONDecodeError):
                    parsed = json.loads(line)
                    if parsed.get("event") == event:
                        found.append(parsed)
        return found

    def errors(self) -> list[str]:
        """Return the log lines that an instance without errors does not write."""
        pattern = re.compile(r'"level": "(error|critical)"|Traceback|Exception|never awaited|was destroyed')
        return [line for line in self.text.splitlines() if pattern.search(line)]

    def end(self) -> None:
        self.client.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.wait()

    def _command(self, mode: Mode) -> list[str]:
        if mode == "serve":
            return [sys.executable, "-m", "tests.support.trial_routes", "serve", "--port", str(self.port)]
        command = [sys.executable, "-m", "uvicorn", "tests.support.trial_app:app", "--port", str(self.port)]
        return command + (["--workers", str(self._workers)] if mode == "workers" else [])


class Fleet:
    """Several instances on one database."""

    def __init__(self, address: str, folder: Path, **env: str) -> None:
        self.address = address
        self.instances: list[InstanceProcess] = []
        self._folder = folder
        self._env = env

    def launch(self, mode: Mode = "serve", *, port: int | None = None, workers: int = 2, **env: str) -> InstanceProcess:
        """Start an instance, without waiting."""
        log = self._folder / f"{len(self.instances)}.log"
        instance = InstanceProcess(
            mode, env.pop("DATABASE_URL", self.address), log, {**self._env, **env}, port, workers
        )
        self.instances.append(instance)
        return instance

    def start(self, count: int = 1, mode: Mode = "serve", **env: str) -> list[InstanceProcess]:
        """Start several instances at once, and wait until all are ready."""
        instances = [self.launch(mode, port=None, workers=2, **env) for _ in range(count)]
        return [instance.wait_ready() for instance in instances]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for instance in self.instances:
            instance.end()


def start(command: Sequence[str], env: Mapping[str, str], log: IO[bytes], *, plain: bool) -> Process:
    """Start a process, from the fork server if there is one and it can launch this command."""
    if fork_server is not None and plain and command[:2] == [sys.executable, "-m"] and "--workers" not in command:
        with Path(os.devnull).open() as nothing:
            return fork_server.launch(
                command[2], command[3:], env, ROOT, (nothing.fileno(), log.fileno(), log.fileno())
            )
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def environment(address: str | None, env: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without any settings of the user who runs the tests."""
    own = {"FLOTILLA_LOG_FORMAT": "json", "PYTHONWARNINGS": "error", **QUICK, **env}
    if address is not None:
        own["DATABASE_URL"] = address
    return plain_environment(os.environ) | own


def run(*arguments: str, address: str | None = None, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Any:
    """Run the command line, and return its exit code and output."""
    return run_module("app", *arguments, env=environment(address, env or {}), cwd=cwd)


def run_module(module: str, *arguments: str, env: Mapping[str, str], cwd: Path = ROOT) -> Any:
    """Run a module to its end in this environment, and return its exit code and output."""
    full = {**env, "PYTHONPATH": str(ROOT)}
    if fork_server is not None:
        return fork_server.run(module, arguments, full, cwd, timeout=300)
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=cwd,
        env=full,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def by_name(view: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in view["instances"]}


def leader_of(instances: Sequence[InstanceProcess]) -> InstanceProcess:
    """Wait until there is a leader, and return it."""

    def find() -> InstanceProcess | None:
        name = instances[0].instances()["leader"]
        return next((instance for instance in instances if instance.me()["name"] == name), None)

    return eventually(find)


@contextlib.contextmanager
def blocked(instance: InstanceProcess, seconds: float) -> Iterator[threading.Thread]:
    """Block the event loop of an instance, from before the body begins, for at most `seconds`."""

    def ask() -> None:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{instance.url}/trial/block?seconds={seconds}", timeout=seconds + 60, verify=NO_TRUST)

    request = threading.Thread(target=ask)
    request.start()
    eventually(lambda: instance.lines("trial.blocks"))
    yield request
    request.join()


def seconds_until(condition: Callable[[], object], *, within: float = BOUND, every: float = 0.005) -> float:
    """Wait until the condition is met, and return how long that took."""
    began = time.monotonic()
    eventually(condition, within=within, every=every)
    return time.monotonic() - began
