"""Each alert fires for a real fault, and none fires during a rolling deploy.

A fault is made on real instances, and their metrics are recorded before it and during it. The recording then lasts for
a quarter of an hour, because alerts wait: `promtool` evaluates the rules over it.
"""

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import pytest
import yaml

from tests.deploy.declared import ROOT
from tests.support.fleet import Fleet, InstanceProcess
from tests.support.postgres import Postgres, eventually
from tests.support.recording import Recording, differences, scrape
from tests.support.rounds import rounds

MONITORING = ROOT / "k8s/components/monitoring"
RULES = MONITORING / "alerts.yml"
TRIAL = "tests.support.trial_actions"
# Intervals of 15 s.
HEALTHY, FAULTY = 4, 60
LATER = "15m"


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=TRIAL, FLOTILLA_POOL_MAX="6") as own:
        yield own


class Fault:
    """Records the metrics of instances before and during a fault."""

    def __init__(self, folder: Path, *instances: InstanceProcess) -> None:
        self._folder = folder
        self._instances = instances
        self._before = Recording()
        self._before.add(instances, HEALTHY)

    def fires(self, *alerts: str) -> None:
        """Record the fault, and check that these alerts fire and no others."""
        self.shows({"30s": {}, LATER: dict.fromkeys(alerts, 1)})

    def shows(self, expected: Mapping[str, Mapping[str, float]]) -> None:
        """Record the fault until these alerts fire at these instants and no others.

        On a busy machine, one scrape may lack the figures of the cluster, or have an anomaly that is soon over.
        """

        def shown() -> bool:
            recording = Recording(steps=[*self._before.steps])
            recording.add(self._instances, FAULTY)
            return not differences(recording, RULES, self._folder, expected)

        # The figures of the cluster are read once a second.
        eventually(shown, every=1.1)


def started(fleet: Fleet, **env: str) -> InstanceProcess:
    """Start an instance, and wait until there is a leader: its absence is a fault."""
    (instance,) = fleet.start(1, "serve", **env)
    eventually(lambda: instance.instances()["leader"])
    return instance


def has_anomaly(instance: InstanceProcess, kind: str) -> bool:
    return kind in [each["kind"] for each in instance.instances()["anomalies"]]


def kinds_of_alerts() -> set[str]:
    return {rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def test_the_operator_gets_the_same_rules() -> None:
    resource = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    assert resource["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]


@pytest.mark.template
def test_every_alert_has_a_page_of_the_runbook_a_row_in_the_guide_and_a_test() -> None:
    tested = re.findall(r"\"(Flotilla\w+)\"", Path(__file__).read_text())
    guide = (ROOT / "docs/guides/monitor.md").read_text()
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            page = rule["annotations"]["runbook_url"]
            assert (ROOT / page).exists() or page == "docs/runbook/{{ $labels.kind }}.md", page
            assert f"| `{rule['alert']}` |" in guide
    assert kinds_of_alerts() == set(tested)


def test_a_missing_leader(fleet: Fleet, address: str, tmp_path: Path) -> None:
    instance = started(fleet)
    fault = Fault(tmp_path, instance)
    with psycopg.connect(address) as intruder:
        # It waits in the queue, and gets the lock when the session of the leader is ended.
        ending = threading.Thread(target=end_queue_session, args=[address])
        ending.start()
        intruder.execute("LOCK TABLE flotilla.leader_turn IN EXCLUSIVE MODE")
        ending.join()
        eventually(lambda: has_anomaly(instance, "no_leader"))
        fault.fires("FlotillaNoLeader")


def end_queue_session(address: str) -> None:
    """Wait until somebody waits behind the leader, and end the leader's session in the queue."""
    waiting = "SELECT FROM pg_locks WHERE relation = 'flotilla.leader_turn'::regclass AND NOT granted"
    with psycopg.connect(address, autocommit=True) as session:
        eventually(lambda: session.execute(waiting).rowcount == 1)
        session.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'flotilla/%/turn/%'"
        )


def test_a_lock_that_is_held_for_long(fleet: Fleet, address: str, tmp_path: Path) -> None:
    fault, instance = before_a_fault_of_a_lock(fleet, tmp_path)
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("UPDATE flotilla.service_locks SET acquired_at = now() - interval '11 minutes'")
    eventually(lambda: has_anomaly(instance, "lock_held_long"))
    fault.fires("FlotillaLockHeldTooLong")


def test_two_holders_of_a_lock(fleet: Fleet, address: str, tmp_path: Path) -> None:
    fault, instance = before_a_fault_of_a_lock(fleet, tmp_path)
    with psycopg.connect(address, autocommit=True) as session:
        # Rows must not be changed by hand.
        session.execute("UPDATE flotilla.service_locks SET token = token + 1, instance_id = 7, instance = 'flotilla-7'")
    eventually(lambda: has_anomaly(instance, "two_holders"))
    fault.fires("FlotillaTwoHoldersOfALock")


def before_a_fault_of_a_lock(fleet: Fleet, folder: Path) -> tuple[Fault, InstanceProcess]:
    """Start an instance, and an action on it that holds a lock."""
    instance = started(fleet)
    instance.trigger("hold-lock")
    eventually(lambda: instance.client.get("/locks").json()["items"])
    return Fault(folder, instance), instance


def test_an_action_that_no_instance_executes(fleet: Fleet, tmp_path: Path) -> None:
    web = started(fleet, FLOTILLA_ROLE="web")
    fault = Fault(tmp_path, web)
    web.trigger("echo", run_at="2026-01-01T00:00:00Z")
    fault.fires("FlotillaNoWorker")


def test_more_connections_than_the_server_allows(fleet: Fleet, tmp_path: Path) -> None:
    instance = started(fleet)
    fault = Fault(tmp_path, instance)
    fleet.start(FLOTILLA_POOL_MAX="500")
    fault.fires("FlotillaConnectionBudget")


def test_another_anomaly(fleet: Fleet, address: str, tmp_path: Path) -> None:
    instance = started(fleet)
    fault = Fault(tmp_path, instance)
    with psycopg.connect(address, autocommit=True) as session:
        # As if the leader's session had ended again and again.
        terms = "INSERT INTO flotilla.leader_terms (instance_id, instance) SELECT 1, 'x' FROM generate_series(1, 9)"
        session.execute(terms)
    eventually(lambda: has_anomaly(instance, "leader_flapping"))
    fault.fires("FlotillaAnomaly")


def test_runs_that_could_begin_and_wait(fleet: Fleet, tmp_path: Path) -> None:
    instance = started(fleet, FLOTILLA_CONCURRENCY="1")
    busy = instance.trigger("nap", {"seconds": 3600})["id"]
    eventually(lambda: instance.run(busy)["state"] == "running")
    fault = Fault(tmp_path, instance)
    instance.trigger("echo", run_at="2026-01-01T00:00:00Z")
    fault.fires("FlotillaBacklogOld")


def test_an_action_that_fails(fleet: Fleet, tmp_path: Path) -> None:
    instance = started(fleet)
    for run_id in instance.trigger_all([{"action": "echo"}] * 20):
        instance.ended(run_id)
    fault = Fault(tmp_path, instance)
    for run_id in instance.trigger_all([{"action": "give-up"}] * 10):
        instance.ended(run_id)
    # Within ten minutes after the failures.
    fault.shows({"45s": {}, "5m": {"FlotillaActionFails": 1}, LATER: {}})


def test_a_write_of_an_instance_that_was_frozen(fleet: Fleet, tmp_path: Path) -> None:
    (owner,) = fleet.start()
    run_id = owner.trigger("late", {"write": "completion"})["id"]
    eventually(lambda: owner.run(run_id)["state"] == "running")
    (other,) = fleet.start()
    fault = Fault(tmp_path, owner, other)
    owner.freeze()
    eventually(lambda: other.run(run_id)["state"] == "succeeded")
    owner.thaw()
    eventually(lambda: owner.lines("run.fenced"))
    owner.wait_ready()
    fault.shows({"45s": {}, "5m": {"FlotillaFencedWrites": 1}})


def test_a_lost_link(tmp_path: Path, own_postgres: Postgres) -> None:
    with Fleet(own_postgres.new_migrated_database(), tmp_path, FLOTILLA_ACTIONS=TRIAL) as fleet:
        instance = started(fleet)
        fault = Fault(tmp_path, instance)
        own_postgres.stop("immediate")
        eventually(lambda: instance.status() == 503)
        eventually(lambda: any(name.startswith("flotilla_link_up") and not up for name, up in scrape(instance).items()))
        fault.fires("FlotillaLinkLost")


def test_a_pool_that_is_used_up(fleet: Fleet, tmp_path: Path) -> None:
    instance = started(fleet, FLOTILLA_POOL_MIN="1", FLOTILLA_POOL_MAX="1", FLOTILLA_POOL_TIMEOUT="0.1")
    fault = Fault(tmp_path, instance)
    occupied = instance.trigger("occupy", {"seconds": 10})["id"]
    eventually(lambda: instance.client.get("/runs").status_code == 503)
    eventually(lambda: instance.status("/runs") == 200)
    assert instance.ended(occupied)["state"] == "succeeded"
    fault.shows({"45s": {}, "4m": {"FlotillaPoolExhausted": 1}})


# Longer than for other tests: beside many other processes, the deploy takes minutes.
@pytest.mark.timeout(900)
@pytest.mark.rounds
@pytest.mark.long
def test_no_alert_fires_during_a_rolling_deploy(fleet: Fleet, tmp_path: Path) -> None:
    """The test takes long because instances start one after the other and end in order: ten in `make chaos`."""
    number = rounds(10)
    instances = fleet.start(number, FLOTILLA_POOL_MAX="3")
    eventually(lambda: instances[0].instances()["leader"])
    recording = Recording(interval="1s")
    finished = threading.Event()

    def record() -> None:
        while not finished.wait(1.0):
            recording.add(list(instances))

    recorder = threading.Thread(target=record)
    recorder.start()
    try:
        for _ in range(number):
            (new,) = fleet.start(FLOTILLA_POOL_MAX="3")
            instances.append(new)
            new.trigger_all([{"action": "nap", "payload": {"seconds": 0.5}}] * 20)
            old = instances.pop(0)
            old.terminate()
            old.wait_exit()
    finally:
        finished.set()
        recorder.join()
    recording.steps += [recording.steps[-1]] * 300
    seconds = len(recording.steps)
    found = differences(recording, RULES, tmp_path, {f"{instant}s": {} for instant in range(5, seconds, 5)})
    assert not found, found
