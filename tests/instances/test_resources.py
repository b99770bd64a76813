"""Resources of real instances: open before the first run, closed after the last one; they never stop the shutdown."""

import psycopg
import pytest

from tests.instances.test_shutdown import STEPS, read_shutdown_records
from tests.support.fleet import Fleet, Mode, environment, run_module
from tests.support.postgres import eventually, free_port

ACTIONS = {"FLOTILLA_ACTIONS": "tests.support.trial_startup"}


def order(log: str, *events: str) -> list[str]:
    """Return these events in the order of their first lines."""
    return sorted(events, key=log.index)


@pytest.mark.parametrize("mode", ["serve", "uvicorn"])
def test_a_resource_is_open_from_before_the_first_run_until_after_the_last_one(fleet: Fleet, mode: Mode) -> None:
    (instance,) = fleet.start(1, mode, TRIAL_STARTUP="works", **ACTIONS)
    looked = instance.ended(1)
    assert (looked["action"], looked["result"]) == ("look", {"lit": True})
    watching = instance.trigger("watch")["id"]
    eventually(lambda: "watch.began" in instance.text)
    instance.terminate()
    instance.wait_exit()

    events = ("lantern.lit", "instance.ready", "watch.began", "watch.ended", "buoy.out", "lantern.out")
    assert order(instance.text, *reversed(events)) == list(events)
    with psycopg.connect(fleet.address) as session:
        ended = session.execute("SELECT result FROM flotilla.finished_runs WHERE id = %s", [watching]).fetchone()
        assert ended == ({"lit": True},)
        # Written while the lantern was closed.
        session.execute("SELECT FROM public.lantern_out")
    (record,) = read_shutdown_records(fleet.address).values()
    assert [(step["step"], step["outcome"]) for step in record] == [(name, "done") for name in STEPS]


def test_a_resource_that_does_not_end_does_not_stop_the_shutdown(fleet: Fleet) -> None:
    (instance,) = fleet.start(1, "serve", TRIAL_STARTUP="hangs", **ACTIONS)
    instance.terminate()
    instance.wait_exit()
    (line,) = instance.lines("resource.failed")
    assert (line["resource"], line["during"]) == ("tests.support.trial_startup.buoy", "closing")
    assert "lantern.out" in instance.text
    (record,) = read_shutdown_records(fleet.address).values()
    assert [(step["step"], step["outcome"]) for step in record] == [(name, "done") for name in STEPS]


@pytest.mark.parametrize(
    "command", [("tests.support.trial_routes", "serve"), ("uvicorn", "tests.support.trial_app:app")]
)
def test_a_resource_that_cannot_be_opened_refuses_the_start_by_name(address: str, command: tuple[str, str]) -> None:
    env = environment(address, {"TRIAL_STARTUP": "fails", **ACTIONS})
    done = run_module(*command, "--port", str(free_port()), env=env)
    output = done.stdout + done.stderr
    assert done.returncode == 3, output
    reason = "could not be opened: ConnectionRefusedError: the buoy does not answer"
    assert f"refused to start: the resource tests.support.trial_startup.buoy {reason}" in output
    # The resource before it was closed, while the pool was open, and nothing of the instance is left.
    assert output.index("lantern.lit") < output.index("lantern.out")
    with psycopg.connect(address) as session:
        assert session.execute("SELECT state FROM flotilla.instances").fetchall() == [("gone",)]
