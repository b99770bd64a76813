"""The commands for actions and runs, with an instance that executes the runs: texts for people, JSON for scripts.

Most commands are called in this process, which is quick; commands that are interrupted or followed are processes.
"""

import json
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from app.fleet.cli import main
from app.fleet.cli.actions import abbreviated, rough_duration
from app.fleet.cli.follow import History
from app.fleet.cli.terminal import clean, duration
from app.fleet.runs.effects.events import StoredEvent
from app.fleet.runs.read.records import RunRecord
from tests.support.fleet import ROOT, Fleet, InstanceProcess, environment, run
from tests.support.postgres import Postgres, eventually, free_port

ACTIONS = "tests.support.trial_actions,tests.support.trial_schedules"
ENDED = {"succeeded", "failed", "cancelled"}


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]


class CommandLine(Protocol):
    def __call__(self, *arguments: str, address: str | None = None, **env: str) -> Done: ...


@dataclass(frozen=True)
class Harbour:
    address: str
    instance: InstanceProcess


@pytest.fixture(scope="module")
def harbour(postgres: Postgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """One instance for the whole module, called `harbour`."""
    address = postgres.new_database()
    with Fleet(address, tmp_path_factory.mktemp("harbour"), FLOTILLA_ACTIONS=ACTIONS) as fleet:
        (instance,) = fleet.start(FLOTILLA_INSTANCE_NAME="harbour")
        yield Harbour(address, instance)
    postgres.drop(address)


@pytest.fixture
def flotilla(
    harbour: Harbour, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[CommandLine]:
    """The command line in this process."""

    def call(*arguments: str, address: str | None = None, **env: str) -> Done:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["flotilla", *arguments])
            for name, value in {"DATABASE_URL": address or harbour.address, "FLOTILLA_ACTIONS": ACTIONS, **env}.items():
                patch.setenv(name, value)
            capsys.readouterr()
            with pytest.raises(SystemExit) as ended:
                main()
        message = capsys.readouterr()
        assert "Traceback" not in message.err
        return Done(int(ended.value.code or 0), message.out, message.err)

    yield call
    for action in ("noop", "nap"):
        call("actions", "resume", action)


def table(text: str) -> list[dict[str, str]]:
    """Parse a printed table, by the positions at which its columns begin."""
    header, *lines = text.splitlines()
    starts = [(found.start(), found[0]) for found in re.finditer(r"\S+( \S+)*", header)]
    ends = [start for start, _ in starts[1:]] + [len(header) + 1000]
    return [{name: line[start:end].strip() for (start, name), end in zip(starts, ends, strict=True)} for line in lines]


def process(harbour: Harbour, *arguments: str, **env: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=environment(harbour.address, {"FLOTILLA_ACTIONS": ACTIONS, **env}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rest_of(command: "subprocess.Popen[str]", within: float = 120) -> tuple[str, str]:
    """Return the rest of the output of a command. `communicate` would lose what is already in the read buffer."""
    assert command.stdout is not None
    assert command.stderr is not None
    hangs = threading.Timer(within, command.kill)
    hangs.start()
    try:
        message = command.stdout.read(), command.stderr.read()
        command.wait()
    finally:
        hangs.cancel()
    return message


def state_of(flotilla: CommandLine, run_id: int) -> str:
    return str(flotilla("runs", str(run_id), "--json").json["state"])


# -- trigger ----------------------------------------------------------------------------------------------------------


def test_trigger_prints_the_run_and_the_command_that_follows_it(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "noop")
    assert done.code == 0, done.err
    found = re.match(r"run (\d+) of noop: \w+\n  \S+ runs \1 --follow\n", done.out)
    assert found, done.out
    eventually(lambda: state_of(flotilla, int(found[1])) == "succeeded")


def test_trigger_with_json_prints_the_run_as_the_rest_api_does(flotilla: CommandLine, harbour: Harbour) -> None:
    run_at = datetime.now(UTC) + timedelta(hours=1)
    made = flotilla("trigger", "nap", "--run-at", run_at.isoformat(), "--json").json
    assert made == harbour.instance.run(made["id"])
    assert made["trigger"] == "api"
    assert datetime.fromisoformat(made["run_at"]) == run_at
    flotilla("runs", "cancel", str(made["id"]))


def test_a_second_trigger_with_the_same_key_prints_the_existing_run(flotilla: CommandLine) -> None:
    first = flotilla("trigger", "noop", "--key", "monday", "--json").json
    second = flotilla("trigger", "noop", "--key", "monday")
    assert second.code == 0
    assert f"this key has already triggered run {first['id']}; no new run was added" in second.out


def test_a_run_is_shown_with_its_ordering_key(flotilla: CommandLine) -> None:
    first_run = flotilla("trigger", "noop", "--ordering-key", "acme", "--run-at", "2999-01-01T00:00:00Z", "--json").json
    assert first_run["ordering_key"] == "acme"
    second_run = flotilla("trigger", "noop", "--ordering-key", "acme", "--json").json
    assert "ordering key   acme" in flotilla("runs", str(second_run["id"])).out
    assert flotilla("runs", str(second_run["id"]), "--json").json["state"] == "pending"
    assert "ordering key" not in flotilla("runs", str(flotilla("trigger", "noop", "--json").json["id"])).out
    assert flotilla("runs", "cancel", str(first_run["id"])).code == 0
    eventually(lambda: flotilla("runs", str(second_run["id"]), "--json").json["state"] == "succeeded")


def test_a_payload_is_read_from_standard_input(harbour: Harbour) -> None:
    with process(harbour, "trigger", "weigh", "--payload", "-", "--follow", "--json") as command:
        out, err = command.communicate('{"weight": 7}', timeout=60)
    assert command.returncode == 0, err
    assert json.loads(out.splitlines()[-1])["data"]["result"] == 7


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["noop", "--payload", '{"weight":'], 2, "the payload is not JSON"),
        (["noop", "--payload", "NaN"], 2, "the payload is not JSON"),
        (["noop", "--payload", "[]"], 2, "the payload does not fit the action 'noop'"),
        (["weigh", "--payload", '{"weight": "heavy"}'], 2, "payload.weight: Input should be a valid integer"),
        (["weigh"], 2, "payload.weight: Field required"),
        (["noop", "--run-at", "tomorrow"], 2, "'tomorrow' is not a time in ISO 8601"),
        (["noop", "--run-at", "2030-01-01T00:00:00"], 2, "run_at needs a time zone"),
        (["noop", "--run-at", "9999-12-31T23:59:59-14:00"], 2, "run_at must be between the years"),
        (["noop", "--priority", "1001"], 2, "'--priority'"),
        (["noop", "--key", ""], 2, "a key must have from 1 to 200 printable characters"),
        (["noop", "--ordering-key", "x" * 201], 2, "an ordering_key must have from 1 to 200 printable characters"),
        ([], 2, "name"),
        (["wiegh"], 5, "did you mean weigh"),
        (["zzz"], 5, "there are alone, "),
    ],
)
def test_an_invalid_trigger_is_refused_and_inserts_no_run(
    flotilla: CommandLine, arguments: list[str], code: int, message: str
) -> None:
    before = [each["id"] for each in flotilla("runs", "--json").json]
    done = flotilla("trigger", *arguments)
    assert done.code == code
    assert message in done.err
    assert [each["id"] for each in flotilla("runs", "--json").json] == before


def test_a_trigger_of_an_action_that_is_not_in_the_database_asks_for_an_instance(
    flotilla: CommandLine, address: str
) -> None:
    assert run("migrate", address=address).returncode == 0
    done = flotilla("trigger", "noop", address=address)
    assert done.code == 5
    assert "in the code, but not yet in the database" in done.err
    assert "flotilla up" in done.err
    assert flotilla("actions", "--json", address=address).json == [], "the command itself inserts no action"


def test_a_missing_module_of_actions_is_reported_as_an_invalid_setting(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "noop", FLOTILLA_ACTIONS="app.nowhere")
    assert done.code == 2
    assert "FLOTILLA_ACTIONS names 'app.nowhere'" in done.err


def test_a_trigger_without_any_declared_action_is_refused_with_that_reason(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "noop", FLOTILLA_ACTIONS="app.models")
    assert done.code == 5
    assert "there are no actions" in done.err


def test_a_trigger_of_an_action_with_overlap_skip_is_refused_and_names_the_active_run(flotilla: CommandLine) -> None:
    first = flotilla("trigger", "alone", "--payload", '{"seconds": 30}', "--json").json
    second = flotilla("trigger", "alone")
    assert second.code == 1
    assert f"has an active run, {first['id']}" in second.err
    flotilla("runs", "cancel", str(first["id"]))


@pytest.mark.empty_database
@pytest.mark.parametrize("command", [["actions"], ["runs"], ["runs", "1"], ["trigger", "noop"]])
def test_a_missing_schema_or_database_is_reported_with_advice(
    flotilla: CommandLine, address: str, command: list[str]
) -> None:
    absent = flotilla(*command, address=address)
    assert absent.code == 4
    assert "`flotilla migrate` creates it" in absent.err
    away = flotilla(*command, address=f"postgresql://app@127.0.0.1:{free_port()}/app")
    assert away.code == 4
    assert "cannot connect to PostgreSQL" in away.err


@pytest.mark.empty_database
def test_a_command_refuses_a_schema_that_is_older_than_itself(flotilla: CommandLine, address: str) -> None:
    assert run("migrate", address=address).returncode == 0
    with psycopg.connect(address) as session:
        session.execute("DELETE FROM flotilla.alembic_version WHERE version_num NOT LIKE 'fleet%'")
        session.execute("UPDATE flotilla.alembic_version SET version_num = 'fleet_0001'")
    behind = flotilla("runs", address=address)
    assert behind.code == 4
    assert "run `flotilla migrate`" in behind.err


# -- following --------------------------------------------------------------------------------------------------------


def test_following_shows_the_instance_the_progress_and_the_result(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "walk", "--payload", '{"steps": 4, "seconds": 0.3}', "--follow")
    assert done.code == 0, done.err
    message = [line[10:] for line in done.out.splitlines() if re.match(r"\d\d:\d\d:\d\d  ", line)]
    running = [place for place, line in enumerate(message) if "running on harbour, attempt 1 of 4" in line]
    assert len(running) == 1
    assert [line.strip() for line in message[running[0] + 1 : -1]] == ["25%", "50%", "75%", "100%"]
    assert re.match(r"succeeded after \d", message[-1])
    assert json.loads(done.out[done.out.index("{") :])["steps"] == 4


def test_following_with_json_prints_one_line_for_each_event_in_order(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "walk", "--payload", '{"steps": 3, "seconds": 0.3}', "--follow", "--json")
    assert done.code == 0, done.err
    assert [line["seq"] for line in done.lines] == [1, 2, 3, 4, 5, 6]
    assert [line["kind"] for line in done.lines] == ["state", "state", *["progress"] * 3, "state"]
    assert [line["data"]["state"] for line in done.lines if line["kind"] == "state"] == [
        "pending",
        "running",
        "succeeded",
    ]


def test_following_a_run_that_fails_prints_the_error_and_exits_with_1(flotilla: CommandLine) -> None:
    done = flotilla("trigger", "fail", "--follow")
    assert done.code == 1
    last = done.out.splitlines()[-1]
    assert "failed after attempt 3 of 3: ValueError: the parcel\\x00is torn" in last


def test_following_a_cancelled_run_exits_with_1(flotilla: CommandLine) -> None:
    flotilla("actions", "pause", "nap")
    waiting = flotilla("trigger", "nap", "--json").json
    assert flotilla("runs", "cancel", str(waiting["id"])).code == 0
    done = flotilla("runs", str(waiting["id"]), "--follow")
    assert done.code == 1
    assert "cancelled: cancelled on request, while it waited" in done.out


def test_a_pending_event_is_described_with_the_reason_of_the_wait(flotilla: CommandLine) -> None:
    made = RunRecord(**flotilla("trigger", "noop", "--json").json)
    now = datetime.now(UTC)

    def described(seq: int, **data: Any) -> str:
        return history.describe(StoredEvent(seq, "state", json.dumps({"instance": "east", **data}), now))

    history = History(made)
    assert described(2, state="running", attempt=2) == "running on east, attempt 2 of 4"
    soon = (now + timedelta(hours=1)).isoformat()
    failed = described(3, state="pending", attempt=2, error="ValueError:\ntorn", run_at=soon)
    assert re.fullmatch(r"pending after attempt 2 of 4, not before [-\d]+ [:\d]+: ValueError: torn", failed)
    assert described(4, state="running", attempt=3) == "running on east, attempt 3 of 4"
    given_back = described(5, state="pending", attempt=2, error=None, run_at=now.isoformat())
    assert given_back == "pending: east is shutting down, and another instance will continue the run"


def test_following_an_ended_run_shows_all_its_events(flotilla: CommandLine) -> None:
    first = flotilla("trigger", "walk", "--payload", '{"steps": 2, "seconds": 0.01}', "--follow", "--json")
    run_id = first.lines[-1]["run"]
    again = flotilla("runs", str(run_id), "--follow", "--json")
    assert again.code == 0
    assert again.lines == first.lines


def test_ctrl_c_ends_the_command_and_not_the_run(flotilla: CommandLine, harbour: Harbour, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    with process(harbour, "trigger", "walk", "--payload", gated(gate, 1), "--follow", "--json") as command:
        assert command.stdout is not None
        run_id = json.loads(command.stdout.readline())["run"]
        command.send_signal(signal.SIGINT)
        _, err = rest_of(command)
    assert command.returncode == 130
    assert f"stopped following; run {run_id} continues" in err
    assert f"runs {run_id} --follow" in err
    assert "Traceback" not in err
    gate.touch()
    followed = flotilla("runs", str(run_id), "--follow", "--json")
    assert followed.code == 0
    assert followed.lines[-1]["data"]["state"] == "succeeded"
    assert followed.lines[-1]["data"]["attempt"] == 1


def gated(gate: Path, steps: int) -> str:
    """Return a payload with which `walk` does not end before the file exists."""
    return json.dumps({"steps": steps, "seconds": 0.05, "gate": str(gate)})


def test_following_continues_after_an_outage_of_the_database(own_postgres: Postgres, tmp_path: Path) -> None:
    address, gate = own_postgres.new_migrated_database(), tmp_path / "gate"
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=ACTIONS) as fleet:
        (instance,) = fleet.start()
        arguments = ("trigger", "walk", "--payload", gated(gate, 20), "--follow", "--json")
        with process(Harbour(address, instance), *arguments) as command:
            assert command.stdout is not None
            lines = [command.stdout.readline() for _ in range(3)]
            own_postgres.stop("immediate")
            assert command.stderr is not None
            warned = command.stderr.readline()
            own_postgres.start_again()
            gate.touch()
            out, err = rest_of(command)
    assert "Waiting for the database" in warned
    assert command.returncode == 0, err
    events = [json.loads(line) for line in [*lines, *out.splitlines()]]
    assert [line["seq"] for line in events] == list(range(1, len(events) + 1)), "each event is shown exactly once"
    assert events[-1]["data"]["state"] == "succeeded"


def test_following_continues_when_the_run_moves_to_another_instance(fleet: Fleet, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for name in ("east", "west"):
        fleet.launch(FLOTILLA_INSTANCE_NAME=name, FLOTILLA_ACTIONS=ACTIONS)
    east, west = (instance.wait_ready() for instance in fleet.instances)
    arguments = ("trigger", "walk", "--payload", gated(gate, 20), "--follow")
    with process(Harbour(fleet.address, east), *arguments) as command:
        assert command.stdout is not None
        line = command.stdout.readline()
        while "running on" not in line:
            line = command.stdout.readline()
        (east if "running on east" in line else west).kill()
        gate.touch()
        out, err = rest_of(command)
    assert command.returncode == 0, err
    assert f"running on {'west' if 'running on east' in line else 'east'}, attempt 2 of 4" in out


def test_following_all_runs_shows_their_changes_from_now_on(flotilla: CommandLine, harbour: Harbour) -> None:
    flotilla("trigger", "noop", "--follow")
    ended = ("--state", "succeeded", "--state", "failed")
    with (
        process(harbour, "runs", "--follow", "--action", "give-up") as text_command,
        process(harbour, "runs", "--follow", *ended, "--json") as json_command,
    ):
        # Trigger one run after the other until both commands print something.
        first = read_along(text_command, lambda: flotilla("trigger", "give-up"))
        second = read_along(json_command, lambda: flotilla("trigger", "noop"))
        for each in (text_command, json_command):
            each.send_signal(signal.SIGINT)
        assert text_command.wait(60) == json_command.wait(60) == 130
    assert re.search(r"\d\d:\d\d:\d\d  run \d+ of give-up: ", first)
    change = json.loads(second)
    assert change["kind"] == "state"
    assert change["data"]["state"] in {"succeeded", "failed"}
    assert change["action"] in {"noop", "give-up"}
    assert change["seq"] == 3


def read_along(command: "subprocess.Popen[str]", trigger: Callable[[], object]) -> str:
    """Trigger until the command prints something, and return its first line."""
    assert command.stdout is not None
    while not select.select([command.stdout], [], [], 0.5)[0]:
        trigger()
    return command.stdout.readline()


# -- actions ----------------------------------------------------------------------------------------------------------


def test_actions_shows_the_schedule_the_next_and_last_run_and_the_standby_instances(flotilla: CommandLine) -> None:
    flotilla("trigger", "echo", "--follow")
    rows = {row["NAME"]: row for row in table(flotilla("actions").out)}
    seldom, echo = rows["seldom"], rows["echo"]
    assert seldom["SCHEDULE"] == "every 10h"
    assert re.fullmatch(r"in (10 h 0|9 h \d\d) min, \d{4}-\d\d-\d\d \d\d:\d\d:\d\d", seldom["NEXT RUN"])
    assert seldom["STATE"] == "active"
    assert seldom["STANDBY"] == "harbour"
    assert re.fullmatch(r"succeeded \d+ (s|min) ago", echo["LAST RUN"])
    assert echo["SCHEDULE"] == echo["NEXT RUN"] == ""


def test_actions_shows_the_instance_that_is_running_an_action(flotilla: CommandLine) -> None:
    made = flotilla("trigger", "nap", "--payload", '{"seconds": 30}', "--json").json
    eventually(lambda: state_of(flotilla, made["id"]) == "running")
    (nap,) = [row for row in table(flotilla("actions").out) if row["NAME"] == "nap"]
    assert nap["RUNNING ON"] == "harbour"
    assert nap["LAST RUN"].startswith("running")
    flotilla("runs", "cancel", str(made["id"]))


def test_actions_with_json_prints_what_the_rest_api_lists(flotilla: CommandLine, harbour: Harbour) -> None:
    listed = {row["name"]: row for row in flotilla("actions", "--json").json}
    answer = harbour.instance.client.get("/actions/seldom")
    assert listed["seldom"] == answer.json()


def test_runs_of_a_paused_action_are_pending_until_it_is_resumed(flotilla: CommandLine) -> None:
    assert flotilla("actions", "pause", "noop").out == "noop: paused\n"
    made = flotilla("trigger", "noop")
    assert re.search(r"noop is paused: the run waits for `\S+ actions resume noop`", made.out)
    run_id = int(re.findall(r"run (\d+) of", made.out)[0])
    assert state_of(flotilla, run_id) == "pending"
    resumed = flotilla("actions", "resume", "noop", "--json").json
    assert resumed["state"] == "active"
    eventually(lambda: state_of(flotilla, run_id) == "succeeded")


def test_resume_prints_the_next_run(flotilla: CommandLine) -> None:
    flotilla("actions", "pause", "seldom")
    assert re.fullmatch(r"seldom: active, next run in .*\n", flotilla("actions", "resume", "seldom").out)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["pause", "nothing"], 5, "there is no action 'nothing'"),
        (["resume", "nothing"], 5, "there is no action 'nothing'"),
        (["pause"], 2, "name"),
        (["stop"], 2, "No such command 'stop'"),
        (["--json", "pause", "noop"], 2, "belongs to the list"),
    ],
)
def test_wrong_usage_of_actions_is_answered_with_a_message(
    flotilla: CommandLine, arguments: list[str], code: int, message: str
) -> None:
    done = flotilla("actions", *arguments)
    assert done.code == code
    assert message in done.err


def test_a_trigger_that_no_living_instance_can_run_prints_that_it_waits(flotilla: CommandLine, address: str) -> None:
    assert run("migrate", address=address).returncode == 0
    with psycopg.connect(address) as session:
        columns = "name, misfire, overlap, priority, max_attempts, retention"
        session.execute(f"INSERT INTO flotilla.actions ({columns}) VALUES ('noop', 'once', 'allow', 0, 4, '1 day')")
    done = flotilla("trigger", "noop", address=address)
    assert done.code == 0, done.err
    assert "no living instance executes noop: the run waits for a worker that has it" in done.out


# -- runs -------------------------------------------------------------------------------------------------------------


def test_runs_lists_the_newest_runs_first_with_their_state(flotilla: CommandLine) -> None:
    flotilla("trigger", "give-up", "--follow")
    flotilla("trigger", "noop", "--follow")
    rows = table(flotilla("runs", "--limit", "2").out)
    assert [(row["ACTION"], row["STATE"], row["ATTEMPT"]) for row in rows] == [
        ("noop", "succeeded", "1/4"),
        ("give-up", "failed", "1/4"),
    ]
    assert [row["ERROR"] for row in rows] == ["", "gave up: there is no such parcel"]
    assert rows[0]["INSTANCE"] == "harbour"
    assert re.fullmatch(r"\d+ ms|\d+\.\d s", rows[0]["TOOK"])


def test_runs_can_be_filtered_by_action_and_by_states(flotilla: CommandLine) -> None:
    for action in ("give-up", "noop"):
        flotilla("trigger", action, "--follow")
    not_succeeded = flotilla("runs", "--state", "failed", "--state", "cancelled", "--json").json
    assert {row["state"] for row in not_succeeded} <= {"failed", "cancelled"}
    assert not_succeeded
    noops = flotilla("runs", "--action", "noop", "--state", "succeeded", "--limit", "1", "--json").json
    assert [row["action"] for row in noops] == ["noop"]


def test_runs_with_an_id_shows_all_fields_of_a_run(flotilla: CommandLine, harbour: Harbour) -> None:
    made = flotilla("trigger", "weigh", "--payload", '{"weight": 3}', "--follow", "--json").lines[-1]["run"]
    shown = flotilla("runs", str(made))
    assert shown.out.startswith(f"run {made} of weigh: succeeded\n")
    assert re.search(r"attempt +1 of 4\n", shown.out)
    assert re.search(r"started +\S+ \S+ on harbour\n", shown.out)
    assert re.search(r'payload +\{"weight": 3, "label": ""\}\n', shown.out)
    assert re.search(r"result +3\n", shown.out)
    assert flotilla("runs", "show", str(made), "--json").json == harbour.instance.run(made)


def test_a_run_for_later_shows_its_time_and_can_be_made_due(flotilla: CommandLine) -> None:
    made = flotilla("trigger", "noop", "--run-at", "2999-01-01T00:00:00Z", "--json").json
    (row,) = table(flotilla("runs", "--state", "pending", "--action", "noop").out)
    assert re.match(r"due (2999-01-01|2998-12-31)", row["STARTED"])
    assert flotilla("runs", "retry", str(made["id"])).code == 0
    eventually(lambda: state_of(flotilla, made["id"]) == "succeeded")


def test_a_running_run_is_cancelled_on_its_instance(flotilla: CommandLine) -> None:
    made = flotilla("trigger", "nap", "--payload", '{"seconds": 60}', "--json").json
    eventually(lambda: state_of(flotilla, made["id"]) == "running")
    message = flotilla("runs", "cancel", str(made["id"]))
    assert "harbour is asked to stop it" in message.out or "cancelled" in message.out
    eventually(lambda: state_of(flotilla, made["id"]) == "cancelled")
    again = flotilla("runs", "cancel", str(made["id"]))
    assert again.code == 1
    assert "cannot be cancelled" in again.err


def test_retry_runs_a_failed_run_again_with_the_same_id(flotilla: CommandLine) -> None:
    run_id = flotilla("trigger", "give-up", "--follow", "--json").lines[-1]["run"]
    failed = flotilla("runs", str(run_id), "--json").json
    again = flotilla("runs", "retry", str(failed["id"]), "--json").json
    assert again["id"] == failed["id"]
    assert again["state"] not in ENDED or again["finished_at"] != failed["finished_at"]
    eventually(lambda: state_of(flotilla, failed["id"]) == "failed")
    good = flotilla("trigger", "noop", "--follow", "--json").lines[-1]["run"]
    refused = flotilla("runs", "retry", str(good))
    assert refused.code == 1
    assert "trigger the action" in refused.err


def test_retry_all_retries_all_failed_runs_of_an_action(flotilla: CommandLine) -> None:
    run_id = flotilla("trigger", "give-up", "--follow", "--json").lines[-1]["run"]
    assert (
        flotilla("runs", "retry-all", "--action", "give-up", "--until", "9h").out
        == "0 runs of give-up: pending again\n"
    )
    again = flotilla("runs", "retry-all", "--action", "give-up", "--since", "1h", "--json").json
    assert again["retried"] >= 1
    eventually(lambda: state_of(flotilla, run_id) == "failed")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["retry-all", "--action", "nothing"], 5, "there is no action 'nothing'"),
        (["retry-all"], 2, "--action"),
        (["retry-all", "--action", "noop", "--since", "soon"], 2, "--since: 'soon' is not a duration"),
        (["999999999"], 5, "there is no run 999999999"),
        (["999999999", "--follow"], 5, "there is no run 999999999"),
        (["cancel", "999999999"], 5, "there is no run 999999999"),
        (["retry", "999999999"], 5, "there is no run 999999999"),
        (["99999999999999999999"], 2, "'ID'"),
        (["cancel", "first"], 2, "'ID'"),
        (["first"], 2, "No such command 'first'"),
        (["--action", "nothing"], 5, "there is no action 'nothing'"),
        (["--state", "torn"], 2, "'torn' is not one of 'pending', 'running'"),
        (["--limit", "0"], 2, "'--limit'"),
        (["--limit", "1001"], 2, "'--limit'"),
        (["--json", "1"], 2, "belongs to the list"),
    ],
)
def test_wrong_usage_of_runs_is_answered_with_a_message(
    flotilla: CommandLine, arguments: list[str], code: int, message: str
) -> None:
    done = flotilla("runs", *arguments)
    assert done.code == code
    assert message in done.err


def test_list_shows_the_number_of_running_runs_of_each_instance(flotilla: CommandLine) -> None:
    made = flotilla("trigger", "nap", "--payload", '{"seconds": 60}', "--json").json
    eventually(lambda: [row["RUNNING"] for row in table(flotilla("list").out)] == ["1"])
    flotilla("runs", "cancel", str(made["id"]))


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.2, "0 s"), (59, "59 s"), (61, "1 min"), (3599, "59 min"), (7260, "2 h 1 min"), (90000, "1 d 1 h")],
)
def test_a_rough_duration_has_at_most_two_units(seconds: float, written: str) -> None:
    assert rough_duration(seconds) == written


@pytest.mark.parametrize(("seconds", "written"), [(0.0123, "12 ms"), (2.25, "2.2 s"), (75, "0:01:15")])
def test_a_short_duration_is_printed_with_milliseconds_and_a_long_one_without(seconds: float, written: str) -> None:
    began = datetime(2030, 1, 1, tzinfo=UTC)
    assert duration(began, began + timedelta(seconds=seconds)) == written


def test_a_long_list_of_names_is_abbreviated() -> None:
    assert abbreviated(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_control_characters_from_the_database_are_escaped() -> None:
    assert clean("torn\x1b[2J\x07\u202e") == "torn\\x1b[2J\\x07\\u202e"
