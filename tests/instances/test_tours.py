"""The tour and the session of the deal desk work as their pages say: each command is run, in one clone.

The two pages share a clone and a shell, as they do for a reader. The output is compared in a few places only: which
instance is the leader, and how much the desk has read, differ each time.
"""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.fleet import NO_TRUST, ROOT
from tests.support.page_reader import DONE, Reader, lend_environment, reading, repository, started_in
from tests.support.pages import Block, blocks
from tests.support.postgres import eventually, free_port

pytestmark = pytest.mark.template

TOUR = ROOT / "docs" / "start" / "tour.md"
DESK = ROOT / "examples" / "deal_desk" / "README.md"
FLOTILLA = ".venv/bin/flotilla"
REPORT = ".venv/bin/python -m examples.deal_desk report"
# The port of the desk's upstreams.
WORLD = free_port()
# Between two looks by a command, each of which takes about a second of a processor.
PAUSE = 2.0


def commands(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "sh"]


def instances(reader: Reader) -> list[dict[str, Any]]:
    reader.type(f"{FLOTILLA} list --json")
    listed: list[dict[str, Any]] = json.loads(reader.shown.partition(DONE)[0])
    return listed


def holders(reader: Reader) -> dict[str, int]:
    """Return the processes of the instances that hold the locks of the desk."""
    reader.type(f"{FLOTILLA} locks")
    found = re.findall(r"^singleton:(\S+) +\d+ +\S+ +\S+ +(\d+) ", reader.shown, re.MULTILINE)
    return {name: int(process) for name, process in found}


@pytest.mark.long
def test_the_tour_and_the_session_of_the_deal_desk(tmp_path: Path) -> None:
    """The test takes long because each page starts three instances, and some of them are killed."""
    origin = repository(tmp_path)
    with reading(tmp_path, DESK_WORLD_PORT=str(WORLD), DESK_WORLD_EVERY="5") as reader:
        subprocess.run(["git", "clone", "--quiet", str(origin), str(reader.clone)], check=True)
        lend_environment(reader.clone)
        reader.type(f"cd {reader.clone}")
        tour(reader)
        desk(reader)
        assert set(started_in(reader.clone)) <= {reader.shell.pid}, "a page leaves something running"


def tour(reader: Reader) -> None:
    start, trigger, kill, leave, stop = commands(TOUR)
    reader.type(start.text)
    assert re.search(r"^flotilla-1 .* ready ", reader.shown, re.MULTILINE)
    reader.type(trigger.text)
    assert "succeeded after" in reader.shown
    assert "event: done" in reader.shown
    leader, another, *_ = sorted(instances(reader), key=lambda each: not each["leader"])
    assert "kill -9 21312" in kill.text
    reader.type(kill.text.replace("21312", str(leader["pid"])).replace("8001", str(another["port"])))
    eventually(lambda: {each["leader"] for each in instances(reader)} == {True, False}, every=PAUSE)
    follower = next(each for each in instances(reader) if not each["leader"] and each["state"] == "ready")
    assert "flotilla-2" in leave.text
    reader.type(leave.text.replace("flotilla-2", follower["name"]).replace("8001", str(follower["port"])))
    eventually(lambda: "shutdown.finished" in shown(reader, f"cat .flotilla/logs/{follower['port']}.log"), every=PAUSE)
    reader.type(stop.text)


def desk(reader: Reader) -> None:
    start, watch, *session, stop = commands(DESK)
    reader.type(start.text)
    eventually(lambda: holders(reader).keys() == {"deal-desk-world", "halts-monitor"}, every=PAUSE)
    eventually(world_is_up)
    eventually(lambda: re.search(r": [1-9]\d* alerts$", shown(reader, REPORT), re.MULTILINE), every=PAUSE)
    reader.type(watch.text)
    assert "deliver-alert" in reader.shown
    for block in session:
        killed = re.findall(r"^kill -9 (\d+)$", block.text, re.MULTILINE)
        text = block.text
        for each in killed:
            text = text.replace(each, str(holders(reader)["halts-monitor"]))
        for line in text.splitlines():
            if "examples.deal_desk" in line:
                eventually(world_is_up)
            reader.type(line)
    assert "0 deals charged twice" in reader.shown
    reader.type(stop.text)
    reader.type("env")
    assert "FLOTILLA_ACTIONS" not in reader.shown
    assert sorted(re.findall(r"^DESK_(\w+)", reader.shown, re.MULTILINE)) == ["WORLD_EVERY", "WORLD_PORT"]


def shown(reader: Reader, command: str) -> str:
    reader.type(command)
    return reader.shown


def world_is_up() -> bool:
    """Whether the upstreams answer: after a kill, another instance hosts them a moment later."""
    try:
        return httpx.get(f"http://127.0.0.1:{WORLD}/record", verify=NO_TRUST).is_success
    except httpx.TransportError:
        return False
