"""Instances find each other: names, migrations and workspaces when many start at once."""

import uuid
from typing import Any

import pytest

from tests.support.fleet import Fleet, by_name, run
from tests.support.postgres import Postgres, eventually


@pytest.mark.empty_database
def test_twenty_instances_started_at_once_have_unique_names_one_leader_and_migrate_once(fleet: Fleet) -> None:
    instances = fleet.start(20, FLOTILLA_POOL_MIN="1", FLOTILLA_POOL_MAX="4")

    def complete_view() -> dict[str, Any] | None:
        """Return the view with a leader and all instances ready.

        On a busy machine, a row may be written after its probe, and an instance that gets no CPU time for seconds is
        declared gone and joins again.
        """
        view = instances[0].instances()
        return view if view["leader"] and len(ready(view)) == 20 else None

    def ready(view: dict[str, Any]) -> list[dict[str, Any]]:
        return [each for each in view["instances"] if each["state"] == "ready"]

    view = eventually(complete_view)
    living = ready(view)
    assert len({each["name"] for each in living}) == 20
    assert len({each["id"] for each in living}) == 20
    assert len({uuid.UUID(each["run_id"]) for each in living}) == 20
    assert sum(each["leader"] for each in living) == 1
    assert sum(len(instance.lines("migration.finished")) for instance in instances) == 1
    assert all(instance.instances()["leader"] == view["leader"] for instance in instances)


def test_the_number_in_a_generated_name_is_never_reused(fleet: Fleet) -> None:
    (first,) = fleet.start()
    name = first.me()["name"]
    first.terminate()
    first.wait_exit()

    (second,) = fleet.start()
    assert second.me()["name"] not in {name, None}
    assert by_name(second.instances())[name]["state"] == "gone"


def test_a_name_in_use_is_refused_with_advice(fleet: Fleet) -> None:
    (holder,) = fleet.start(FLOTILLA_INSTANCE_NAME="harbour")
    late = fleet.launch(FLOTILLA_INSTANCE_NAME="harbour")

    assert late.wait_exit() == 3
    assert "a live instance is already named 'harbour'" in late.text
    assert f"pid {holder.pid}" in late.text
    assert "FLOTILLA_INSTANCE_NAME" in late.text
    assert "Traceback" not in late.text
    holder.wait_ready()


def test_the_name_of_a_killed_instance_is_free_at_once_without_other_instances(fleet: Fleet) -> None:
    (first,) = fleet.start(FLOTILLA_INSTANCE_NAME="harbour")
    number = first.me()["id"]
    first.kill()

    (second,) = fleet.start(FLOTILLA_INSTANCE_NAME="harbour")
    assert second.me()["id"] > number


def test_a_workspace_is_exclusive_unless_it_is_forced(fleet: Fleet) -> None:
    (owner,) = fleet.start(FLOTILLA_WORKSPACE="volume-1")
    late = fleet.launch(FLOTILLA_WORKSPACE="volume-1")
    assert late.wait_exit() == 3
    assert "the workspace 'volume-1' is in use by " + owner.me()["name"] in late.text
    assert "--force" in late.text

    (forced,) = fleet.start(FLOTILLA_WORKSPACE="volume-1", FLOTILLA_WORKSPACE_FORCE="true")
    assert forced.lines("workspace.shared_by_force")
    assert forced.me()["workspace"] == "volume-1"
    owner.wait_ready()


def test_two_namespaces_in_one_database_are_independent(fleet: Fleet, postgres: Postgres) -> None:
    red = fleet.start(2, FLOTILLA_NAMESPACE="red")
    blue = fleet.start(2, FLOTILLA_NAMESPACE="blue-sea")
    for instances, namespace in ((red, "red"), (blue, "blue-sea")):
        view = eventually(lambda: instances[0].instances() if instances[0].instances()["leader"] else None)  # noqa: B023
        assert view["namespace"] == namespace
        assert len(view["instances"]) == 2
        assert all(each["name"].startswith(f"{namespace}-") for each in view["instances"])
        # Names and ids are counted apart.
        assert {each["id"] for each in view["instances"]} == {1, 2}

    database = fleet.address.rpartition("/")[2]
    with postgres.session(database) as session:
        # The same ids in the same database at the same time: the lock keys differ only in their first number.
        rows = session.execute(
            "SELECT classid::regnamespace::text, array_agg(objid::int ORDER BY objid) FROM pg_locks "
            "WHERE locktype = 'advisory' AND objsubid = 2 AND granted "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) GROUP BY 1"
        ).fetchall()
        assert dict(rows) == {"red": [1, 2], "blue_sea": [1, 2]}
        # A notification on one channel does not reach the other namespace: send one with an id that both have.
        session.execute("SELECT pg_notify('red', 'drain:1')")

    # `red-1` exists only in the namespace `red`, and each namespace reads its own rows.
    asked = run("down", "red-1", address=fleet.address, env={"FLOTILLA_NAMESPACE": "blue-sea"})
    assert asked.returncode == 5
    for instance in (*red, *blue):
        instance.wait_ready()
    victim = next(instance for instance in red if instance.me()["name"] == "red-1")
    assert run("down", "red-1", address=fleet.address, env={"FLOTILLA_NAMESPACE": "red"}).returncode == 0
    assert victim.wait_exit() is not None
    for instance in blue:
        instance.wait_ready()
    assert {each["state"] for each in blue[0].instances()["instances"]} == {"ready"}
