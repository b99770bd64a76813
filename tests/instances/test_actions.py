"""Actions on real instances: invalid declarations, misbehaving actions, different releases, pauses, cancellations."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fleet import Fleet, environment, run
from tests.support.postgres import eventually

TRIAL = "tests.support.trial_actions"


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL) as own:
        yield own


WRONG = {
    "cron": '@action("ship-it", cron="61 * * * *")',
    "zone": '@action("ship-it", cron="0 9 * * *", timezone="Europe/Atlantis")',
    "option": '@action("ship-it", overlap="never")',
    "twice": '@action("ship-it")\nasync def first(_: Run) -> None: ...\n\n@action("ship-it")',
}
MESSAGES = {
    "cron": "the cron expression '61 * * * *' is not valid: Bad minute",
    "zone": "there is no time zone 'Europe/Atlantis'",
    "option": "`overlap` is 'never', and must be one of 'skip', 'queue', 'allow'",
    "twice": "two actions are called 'ship-it': wrong_actions.first and wrong_actions.ship",
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_service_with_an_invalid_action_does_not_start_and_names_the_action(
    address: str, tmp_path: Path, mistake: str
) -> None:
    declared = f"from app.fleet import Run, action\n\n{WRONG[mistake]}\nasync def ship(_: Run) -> None: ...\n"
    (tmp_path / "wrong_actions.py").write_text(declared)
    done = run("serve", "--port", "0", address=address, env={"FLOTILLA_ACTIONS": "wrong_actions"}, cwd=tmp_path)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert MESSAGES[mistake] in output
    assert "'ship-it'" in output
    assert "Traceback" not in output
    assert environment(address, {})["FLOTILLA_LOG_FORMAT"] == "json"


def test_a_run_that_blocks_its_instance_is_ended_by_another(fleet: Fleet) -> None:
    (blocked,) = fleet.start()
    # From the command line, because the blocked instance may not respond to a request.
    order = ["trigger", "block", "--payload", '{"seconds": 120}', "--json"]
    made = run(*order, address=fleet.address, env={"FLOTILLA_ACTIONS": TRIAL})
    assert made.returncode == 0, made.stderr
    run_id = json.loads(made.stdout)["id"]
    eventually(lambda: blocked.lines("run.blocks_loop"))
    (other,) = fleet.start()
    ended = other.ended(run_id)
    assert ended["state"] == "failed"
    assert "exceeded its deadline, and its instance flotilla-1 did not end it" in ended["error"]
    (line,) = blocked.lines("run.blocks_loop")
    assert "trial_actions.py" in line["where"]
    assert other.ended(other.trigger("echo")["id"])["state"] == "succeeded"


def test_runs_that_raise_exit_hang_or_return_nonsense_do_not_disturb_other_runs(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    bad = ["fail", "quit", "hang", "deaf", "deaf-thread", "not-json", "give-up"]
    ids = instance.trigger_all([{"action": name} for name in bad for _ in range(5)])
    good = instance.trigger_all([{"action": "echo", "payload": {"n": n}} for n in range(100)])
    assert {instance.ended(run_id)["state"] for run_id in good} == {"succeeded"}
    assert {instance.ended(run_id)["state"] for run_id in ids} == {"failed"}
    instance.wait_ready()
    instance.terminate()
    assert instance.wait_exit() in {0, -15}, "attempts that never end do not keep the process alive"


def test_runs_are_claimed_only_by_instances_that_declare_their_action(fleet: Fleet) -> None:
    (older,) = fleet.start(FLOTILLA_ACTIONS="tests.support.trial_schedules")
    (newer,) = fleet.start()
    ids = newer.trigger_all([{"action": "nap", "payload": {"seconds": 0.01}}] * 200)
    assert {newer.ended(run_id)["instance"] for run_id in ids} == {newer.me()["name"]}
    refused = older.client.post("/actions/nap/runs")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
    assert older.client.get("/actions/nap").json()["standby"] == [newer.me()["name"]]

    waiting = newer.trigger("nap", {"seconds": 0}, run_at="2020-01-01T00:00:00Z")
    newer.kill()
    eventually(lambda: older.run(waiting["id"])["state"] in {"pending", "succeeded"})
    (again,) = fleet.start()
    assert again.ended(waiting["id"])["state"] == "succeeded"


def test_a_paused_action_accepts_triggers_and_starts_no_run_until_it_is_resumed(fleet: Fleet) -> None:
    one, two = fleet.start(2)
    assert one.client.post("/actions/echo/pause").json()["state"] == "paused"
    ids = two.trigger_all([{"action": "echo"}] * 20)
    after = two.trigger("noop")["id"]
    assert two.ended(after)["state"] == "succeeded"
    assert {one.run(run_id)["state"] for run_id in ids} == {"pending"}
    assert two.client.post("/actions/echo/resume").json()["state"] == "active"
    assert {one.ended(run_id)["state"] for run_id in ids} == {"succeeded"}


def test_a_run_can_be_cancelled_through_any_instance(fleet: Fleet) -> None:
    (owner,) = fleet.start()
    run_id = owner.trigger("nap", {"seconds": 60})["id"]
    eventually(lambda: owner.run(run_id)["state"] == "running")
    (other,) = fleet.start()
    assert other.client.post(f"/runs/{run_id}/cancel").status_code == 200
    ended = other.ended(run_id)
    assert (ended["state"], ended["error"], ended["instance"]) == ("cancelled", "cancelled on request", "flotilla-1")


def test_the_registry_has_the_number_of_running_runs_of_an_instance(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    instance.trigger_all([{"action": "nap", "payload": {"seconds": 20}}] * 7)
    eventually(lambda: instance.me()["running"] == 7)
