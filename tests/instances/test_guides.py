"""The commands of the guides, and the client in Python, do what the pages say, on a real instance.

A reader's shell has the command line in its path, and the settings of this instance.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import tools
from tests.support.fleet import ROOT, Fleet, InstanceProcess, environment
from tests.support.pages import blocks
from tests.support.postgres import Postgres, eventually, free_port

pytestmark = pytest.mark.template

GUIDES = ROOT / "docs" / "guides"
BIN = Path(sys.executable).parent
ACTIONS = """
import asyncio

from app.fleet import Run, action, lock


@action("sound")
async def sound(run: Run) -> dict[str, float]:
    await run.progress(1, run.payload["place"])
    return {"metres": 4.2}


@action("close-books")
async def close_books(run: Run) -> None:
    async with lock("books"):
        await asyncio.sleep(3600)
"""


def command(page: str, text: str, language: str = "sh") -> str:
    """Return the block of a guide that contains this text."""
    (found,) = (each.text for each in blocks(GUIDES / page) if each.language == language and text in each.text)
    return found


@pytest.fixture(scope="module")
def service(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstanceProcess]:
    address = postgres.new_migrated_database()
    folder = tmp_path_factory.mktemp("guides")
    (folder / "actions_of_guides.py").write_text(ACTIONS)
    with Fleet(address, folder, FLOTILLA_ACTIONS="actions_of_guides", PYTHONPATH=str(folder)) as fleet:
        (instance,) = fleet.start()
        yield instance
    postgres.drop(address)


@pytest.fixture
def shell(service: InstanceProcess, address_of_service: str, tmp_path: Path) -> Callable[..., str]:
    def type_here(commands: str) -> str:
        """Run commands as typed, and return what they show."""
        done = subprocess.run(
            ["bash", "-eu", "-c", commands],
            cwd=ROOT,
            env=shell_environment(address_of_service, service.log.parent, tmp_path),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return type_here


@pytest.fixture
def address_of_service(service: InstanceProcess) -> str:
    # The instance was given it in its environment.
    return Path(f"/proc/{service.pid}/environ").read_text().partition("DATABASE_URL=")[2].partition("\0")[0]


def shell_environment(address: str, actions: Path, home: Path) -> dict[str, str]:
    settings = {"FLOTILLA_ACTIONS": "actions_of_guides", "PYTHONPATH": f"{ROOT}:{actions}", "HOME": str(home)}
    return environment(address, settings) | {"PATH": f"{BIN}:{os.environ['PATH']}", "FLOTILLA_LOG_FORMAT": "auto"}


@pytest.fixture
def following(service: InstanceProcess, address_of_service: str, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Return a function that starts a command that has no end, and returns the file with what it shows."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: str) -> Path:
        shown = tmp_path / f"shown-{len(processes)}"
        env = shell_environment(address_of_service, service.log.parent, tmp_path)
        with shown.open("w") as output:
            processes.append(subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=ROOT, env=env, stdout=output))
        return shown

    yield start
    for each in processes:
        # Ctrl-C.
        each.send_signal(signal.SIGINT)
        each.wait(60)


def test_a_key_for_a_client(shell: Callable[..., str]) -> None:
    shown = shell(command("deploy.md", "flotilla key grafana"))
    assert "grafana:read:" in shown


def test_locks_are_listed_and_released_by_force(service: InstanceProcess, shell: Callable[..., str]) -> None:
    service.trigger("close-books")
    listing = command("locks.md", "flotilla locks")
    eventually(lambda: "books" in shell(listing))
    shell(command("locks.md", "flotilla release"))
    run = service.client.get("/runs", params={"action": "close-books"}).json()["items"][0]
    eventually(lambda: service.run(run["id"])["error"] is not None)
    assert service.client.post(f"/runs/{run['id']}/cancel").is_success


def test_a_run_is_followed_on_the_command_line(
    service: InstanceProcess, shell: Callable[..., str], following: Callable[[str], Path]
) -> None:
    trigger, follow, feed = command("follow-runs.md", "flotilla trigger sound").splitlines()
    assert "harbour mouth" in shell(trigger)
    run = service.trigger("sound", {"place": "the bar"})["id"]
    assert "succeeded after" in shell(follow.replace("17", str(run)))
    shown = following(feed)
    # It shows what happens after it has connected.
    eventually(lambda: cancelled_run(service) and "of sound: cancelled" in shown.read_text())


def test_a_run_and_the_feed_are_followed_with_curl(
    service: InstanceProcess, shell: Callable[..., str], following: Callable[[str], Path]
) -> None:
    tools.program("curl")
    run = service.trigger("sound", {"place": "the bar"})["id"]
    here = service.url.removeprefix("http://")
    one = command("follow-runs.md", "curl -N http").replace("17", str(run)).replace("127.0.0.1:8001", here)
    assert "event: done" in shell(one)
    feed = command("follow-runs.md", "curl -N 'http").replace("127.0.0.1:8001", here)
    shown = following(feed)
    eventually(lambda: ": up to here" in shown.read_text())


def cancelled_run(service: InstanceProcess) -> int:
    """Trigger a run that is not due, and cancel it."""
    run: int = service.trigger("sound", run_at="2099-01-01T00:00:00Z")["id"]
    assert service.client.post(f"/runs/{run}/cancel").is_success
    return run


def test_a_client_in_python_follows_a_run(service: InstanceProcess, shell: Callable[..., str], tmp_path: Path) -> None:
    run = service.trigger("sound", {"place": "the bar"})["id"]
    client = command("follow-runs.md", "def follow(", "python")
    use = command("follow-runs.md", "for event in follow(", "python").replace("17", str(run))
    assert '"http://127.0.0.1:8000"' in use
    program = tmp_path / "program.py"
    program.write_text(f"{client}\n\nkey = 'none'\n{use.replace('http://127.0.0.1:8000', service.url)}")
    shown = shell(f"python {program}").splitlines()
    assert [line.split()[:2] for line in shown] == [
        ["1", "state"],
        ["2", "state"],
        ["3", "progress"],
        ["4", "state"],
    ]


def test_one_instance_in_the_foreground(service: InstanceProcess, address_of_service: str, tmp_path: Path) -> None:
    """As for a debugger: `docs/guides/develop.md`."""
    setting, program, serve = command("develop.md", "flotilla serve").split()
    assert program == ".venv/bin/flotilla"
    name, value = setting.split("=")
    env = shell_environment(address_of_service, service.log.parent, tmp_path) | {name: value}
    port = str(free_port())
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([BIN / "flotilla", serve, "--port", port], cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        eventually(lambda: len([each for each in service.instances()["instances"] if each["state"] == "ready"]) == 2)
        process.send_signal(signal.SIGINT)
        process.wait(120)
    finally:
        process.kill()
        process.wait()
