"""Roles: `web` instances trigger and never execute, `worker` instances execute and serve only probes and metrics.

The instances are started with the variable of `docs/guides/roles.md`.
"""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.support.fleet import Fleet, InstanceProcess, by_name, leader_of, run
from tests.support.postgres import eventually
from tests.support.trial_actions import EFFECTS

TRIAL, SINGLETONS = "tests.support.trial_actions", "tests.support.trial_singletons"
NOT_SERVED = ("/actions", "/actions/echo", "/runs", "/runs/1", "/events", "/locks", "/openapi.json", "/no-such-path")


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL) as own:
        yield own


def anomalies(instance: InstanceProcess) -> list[tuple[str, str]]:
    return [(each["kind"], each["subject"]) for each in instance.instances()["anomalies"]]


def test_a_web_instance_begins_none_of_ten_thousand_runs(fleet: Fleet, address: str) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    fleet.start(2, FLOTILLA_ROLE="worker")
    ids = [run_id for _ in range(10) for run_id in web.trigger_all([{"action": "noop"}] * 1000)]
    with psycopg.connect(address, autocommit=True) as session:
        ended = "SELECT count(*) FROM flotilla.finished_runs WHERE state = 'succeeded'"
        eventually(lambda: session.execute(ended).fetchone() == (len(ids),), within=180)
        begun = session.execute("SELECT DISTINCT instance FROM flotilla.finished_runs").fetchall()
    roles = {each["name"]: each["role"] for each in web.instances()["instances"]}
    assert {roles[name] for (name,) in begun} == {"worker"}
    scrape = web.client.get("/metrics").text
    assert 'flotilla_runs_started_total{action="noop"} 0.0\n' in scrape
    assert 'role="web"' in scrape


def test_triggers_succeed_while_no_worker_lives_and_the_runs_wait_for_one(fleet: Fleet) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    (worker,) = fleet.start(FLOTILLA_ROLE="worker")
    assert web.ended(web.trigger("echo")["id"])["state"] == "succeeded"
    assert web.client.get("/actions/echo").json()["state"] == "active"

    busy = web.trigger("nap", {"seconds": 3600})["id"]
    eventually(lambda: web.run(busy)["state"] == "running")
    worker.kill()
    # The second one has been due for long enough to be reported.
    waiting = [web.trigger("echo")["id"], web.trigger("echo", run_at="2026-01-01T00:00:00Z")["id"]]
    eventually(lambda: web.run(busy)["state"] == "pending")
    eventually(lambda: web.client.get("/actions/echo").json()["state"] == "no_worker")
    assert web.client.get("/actions/echo").json()["standby"] == []
    assert ("no_worker", "echo") in anomalies(web)
    assert {web.run(run_id)["state"] for run_id in waiting} == {"pending"}
    shown = run("trigger", "noop", address=fleet.address, env={"FLOTILLA_ACTIONS": TRIAL})
    assert "no living instance executes noop: the run waits for a worker that has it" in shown.stdout

    fleet.start(FLOTILLA_ROLE="worker")
    assert {web.ended(run_id)["state"] for run_id in waiting} == {"succeeded"}
    eventually(lambda: web.run(busy)["state"] == "running")
    assert web.client.get("/actions/echo").json()["state"] == "active"
    assert ("no_worker", "echo") not in anomalies(web)


def test_no_trigger_fails_while_the_only_worker_is_killed_and_replaced(fleet: Fleet) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web")
    ids = []
    for _ in range(3):
        worker = fleet.launch(FLOTILLA_ROLE="worker")
        while not worker.is_ready():
            ids.append(web.trigger("echo")["id"])
        ids += [web.trigger("echo")["id"] for _ in range(20)]
        worker.kill()
    fleet.start(FLOTILLA_ROLE="worker")
    assert {web.ended(run_id)["state"] for run_id in ids} == {"succeeded"}


def test_a_web_instance_leads_only_while_no_worker_can(fleet: Fleet) -> None:
    first, second = fleet.start(2, FLOTILLA_ROLE="web")
    assert leader_of([first, second]).me()["role"] == "web"
    (worker,) = fleet.start(FLOTILLA_ROLE="worker")
    name = eventually(lambda: leader_named(first, "worker"))
    worker.terminate()
    worker.wait_exit()
    eventually(lambda: leader_named(first, "web"))
    (other,) = fleet.start(FLOTILLA_ROLE="worker")
    assert eventually(lambda: leader_named(first, "worker")) != name
    killed = other.me()["name"]
    other.kill()
    # The web instances notice that the worker's session in the queue has ended, and one declares it gone.
    eventually(lambda: leader_named(first, "web"))
    eventually(lambda: is_gone(first, killed))
    assert "leader_flapping" not in [kind for kind, _ in anomalies(first)]


def is_gone(instance: InstanceProcess, name: str) -> bool:
    return bool(by_name(instance.instances())[name]["state"] == "gone")


def leader_named(instance: InstanceProcess, role: str) -> str | None:
    """Return the name of the leader, if there is one and it has this role."""
    view = instance.instances()
    return next((each["name"] for each in view["instances"] if each["leader"] and each["role"] == role), None)


def test_due_slots_become_runs_although_only_a_web_instance_lives(fleet: Fleet, address: str) -> None:
    (web,) = fleet.start(FLOTILLA_ROLE="web", FLOTILLA_ACTIONS="tests.support.trial_schedules")
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("UPDATE flotilla.actions SET next_run_at = now()")
        session.execute("SELECT pg_notify('flotilla', 'slots:')")
    (waiting,) = eventually(lambda: web.client.get("/runs?action=seldom").json()["items"])
    assert (waiting["state"], waiting["trigger"]) == ("pending", "schedule")
    assert web.client.get("/actions/seldom").json()["next_run_at"] is not None


def test_a_singleton_runs_on_a_worker_and_never_on_a_web_instance(fleet: Fleet, address: str) -> None:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(EFFECTS)
    (web,) = fleet.start(FLOTILLA_ROLE="web", FLOTILLA_ACTIONS=SINGLETONS)
    assert web.client.get("/locks").json()["items"] == []
    (worker,) = fleet.start(FLOTILLA_ROLE="worker", FLOTILLA_ACTIONS=SINGLETONS)
    eventually(lambda: worker.lines("singleton.began"))
    assert not web.lines("singleton.began")
    (held,) = web.client.get("/locks").json()["items"]
    assert (held["name"], held["instance"]) == ("singleton:beacon", worker.me()["name"])


def test_a_worker_serves_only_probes_metrics_and_the_list_of_instances(fleet: Fleet) -> None:
    (worker,) = fleet.start(FLOTILLA_ROLE="worker")
    served = ("/health/live", "/health/ready", "/health/instances", "/metrics", "/problems")
    # A probe waits for the database for a second only.
    eventually(lambda: {worker.status(path, timeout=30) for path in served} == {200})
    assert {path: worker.status(path, timeout=30) for path in NOT_SERVED} == dict.fromkeys(NOT_SERVED, 503)
    refused = worker.client.post("/actions/echo/runs", json={})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert "this instance has the role worker" in refused.json()["detail"]


def test_roles_are_given_by_option_and_refused_if_unknown(fleet: Fleet) -> None:
    wrong = run("serve", "--port", "0", address=fleet.address, env={"FLOTILLA_ROLE": "wrker"})
    assert wrong.returncode != 0
    assert "FLOTILLA_ROLE: Input should be 'all', 'web' or 'worker'" in wrong.stdout + wrong.stderr
