"""How long a user waits for `flotilla up` until all three instances are ready, the first and the second time."""

import json
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.report import spread
from tests.support.fleet import run as command
from tests.support.postgres import free_port

ROUNDS = 5


def run(*, short: bool) -> None:
    first, again = [], []
    for _ in range(1 if short else ROUNDS):
        with tempfile.TemporaryDirectory(prefix="flotilla-start-") as name:
            folder = Path(name)
            first.append(up(folder))
            command("down", cwd=folder)
            again.append(up(folder))
            command("down", cwd=folder)
    print(f"`flotilla up`, first time (database made)     {spread(first)} s")
    kept = "kept" if max(again) <= 5 else "NOT KEPT"
    print(f"`flotilla up`, second time, to three ready    {spread(again)} s   (≤ 5 s: {kept})")


def up(folder: Path) -> float:
    """Start three instances, and wait until each of them shows three ready instances and one leader."""
    port = free_port(3)
    began = time.monotonic()
    done = command("up", "--port", str(port), cwd=folder)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)
    while not all(complete(port + number) for number in range(3)):
        time.sleep(0.01)
    return time.monotonic() - began


def complete(port: int) -> bool:
    view = json.loads(httpx.get(f"http://127.0.0.1:{port}/health/instances").text)
    living = [each for each in view["instances"] if each["state"] != "gone"]
    return [each["state"] for each in living] == ["ready"] * 3 and sum(each["leader"] for each in living) == 1
