"""A deploy during long runs costs them no attempt and no progress."""

from pathlib import Path

from tests.support.fleet import Fleet
from tests.support.postgres import eventually

RUNS = 12


def test_in_a_rolling_restart_runs_continue_from_their_checkpoint_without_a_new_attempt(
    address: str, tmp_path: Path
) -> None:
    # A run that is not paused in time would be rescued, which is another case.
    patient = {"FLOTILLA_PAUSE_TIMEOUT": "20"}
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS="tests.support.trial_actions", **patient) as fleet:
        instances = fleet.start(3)
        # No run ends before all three instances were replaced.
        gate = tmp_path / "gate"
        payload = {"steps": 80, "seconds": 0.05, "gate": str(gate)}
        ids = instances[0].trigger_all([{"action": "walk", "payload": payload}] * RUNS)
        eventually(lambda: all((instances[0].run(each)["progress"] or {"done": 0})["done"] > 0.05 for each in ids))
        for old in list(instances):
            (new,) = fleet.start()
            old.terminate()
            assert old.wait_exit() in {0, -15}
            assert not old.errors()
            instances.remove(old)
            instances.append(new)
        gate.touch()
        witness = instances[0]
        runs = [witness.ended(run_id, within=60) for run_id in ids]
        assert {run["state"] for run in runs} == {"succeeded"}
        assert {run["attempt"] for run in runs} == {1}, "a pause does not count as an attempt"
        assert all(len(run["result"]["instances"]) > 1 for run in runs), "each was moved at least once"
        assert all(run["result"]["steps"] == 80 for run in runs)
