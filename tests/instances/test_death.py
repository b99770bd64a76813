"""How instances die, how the leader detects that, and which events must not lead to a declaration."""

import time
from typing import Any

import pytest

from app.fleet.db.direct import LEASE
from tests.support.fleet import Fleet, InstanceProcess, blocked, by_name, leader_of
from tests.support.postgres import Postgres, eventually


def others(instances: list[InstanceProcess], one: InstanceProcess) -> list[InstanceProcess]:
    return [instance for instance in instances if instance is not one]


def row(witness: InstanceProcess, name: str) -> dict[str, Any]:
    return by_name(witness.instances())[name]


def wait_for_more(instance: InstanceProcess, event: str, than: int) -> None:
    eventually(lambda: len(instance.lines(event)) > than)


def presence_backend(postgres: Postgres, address: str, identifier: int) -> int:
    """Return the backend that holds the presence lock of an instance."""
    with postgres.session(address.rpartition("/")[2]) as session:
        found = session.execute(
            "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2 AND objid = %s "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())",
            [identifier],
        ).fetchone()
    assert found is not None
    return int(found[0])


def test_a_killed_follower_is_declared_gone_and_the_leader_stays(fleet: Fleet) -> None:
    instances = fleet.start(3)
    leader = leader_of(instances)
    victim = others(instances, leader)[0]
    name = victim.me()["name"]
    victim.kill()

    eventually(lambda: row(leader, name)["state"] == "gone")
    dead = row(leader, name)
    assert dead["gone_reason"] == "its session ended"
    assert leader_of(others(instances, victim)) is leader


def test_a_killed_leader_is_declared_gone_and_another_instance_leads(fleet: Fleet) -> None:
    instances = fleet.start(3)
    leader = leader_of(instances)
    name = leader.me()["name"]
    leader.kill()

    witness = others(instances, leader)[0]
    eventually(lambda: row(witness, name)["state"] == "gone")
    view = witness.instances()
    assert view["leader"] in {instance.me()["name"] for instance in others(instances, leader)}
    assert sum(each["leader"] for each in view["instances"]) == 1


def test_a_frozen_instance_loses_its_lease_and_rejoins_with_a_new_id(fleet: Fleet) -> None:
    instances = fleet.start(3)
    frozen = leader_of(instances)
    before = frozen.me()
    witness = others(instances, frozen)[0]
    frozen.freeze()
    began = time.monotonic()
    eventually(lambda: row(witness, before["name"])["state"] == "gone")
    assert time.monotonic() - began > 2.5, (
        "the server ended the session before the instance would have stopped by itself"
    )
    assert witness.instances()["leader"] != before["name"]
    frozen.thaw()

    eventually(lambda: frozen.lines("instance.identity_lost"))
    frozen.wait_ready()
    after = frozen.me()
    assert after["id"] > before["id"]
    assert after["name"] == before["name"]
    assert after["run_id"] == before["run_id"]
    states = {each["id"]: each["state"] for each in witness.instances()["instances"]}
    assert states[before["id"]] == "gone"
    assert states[after["id"]] == "ready"


def test_a_frozen_candidate_that_is_declared_gone_leaves_the_queue_for_leadership(
    fleet: Fleet, postgres: Postgres
) -> None:
    """No timer of the server ends a session that waits for a lock; a frozen candidate could become the leader."""
    (leader,) = fleet.start()
    leader_of([leader])
    (frozen,) = fleet.start()
    name = frozen.me()["name"]
    (third,) = fleet.start()
    frozen.freeze()
    eventually(lambda: row(leader, name)["state"] == "gone")
    with postgres.session(fleet.address.rpartition("/")[2]) as session:
        waiting = (
            "SELECT count(*) FROM pg_locks WHERE relation = 'flotilla.leader_turn'::regclass AND mode = 'ExclusiveLock'"
        )
        eventually(lambda: session.execute(waiting).fetchone() == (2,))
    leader.terminate()
    assert leader_of([third]) is third
    frozen.thaw()
    frozen.wait_ready()


def test_an_instance_reconnects_a_terminated_link_with_the_same_id(fleet: Fleet, postgres: Postgres) -> None:
    instances = fleet.start(2)
    before = {instance.port: instance.me()["id"] for instance in instances}
    for _ in range(5):
        for instance in instances:
            relinks = len(instance.lines("link.up"))
            backend = presence_backend(postgres, fleet.address, before[instance.port])
            with postgres.session() as session:
                session.execute("SELECT pg_terminate_backend(%s)", [backend])
            wait_for_more(instance, "link.up", relinks)

    for instance in instances:
        instance.wait_ready()
        assert instance.me()["id"] == before[instance.port]
        assert not instance.lines("instance.identity_lost")
        assert not instance.lines("instance.gone")


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_no_instance_is_declared_gone_because_the_database_restarts(
    own_postgres: Postgres, tmp_path: Any, mode: str
) -> None:
    with Fleet(own_postgres.address_of(), tmp_path) as fleet:
        instances = fleet.start(3)
        leader_of(instances)
        before = {instance.port: instance.me()["id"] for instance in instances}
        own_postgres.stop(mode)
        eventually(lambda: all(instance.status() == 503 for instance in instances))
        assert all(instance.status("/health/live") == 200 for instance in instances)
        own_postgres.start_again()

        for instance in instances:
            instance.wait_ready()
        assert {instance.port: instance.me()["id"] for instance in instances} == before
        # Longer than the leader waits after a restart: a wrong declaration would have been made by now.
        leader_of(instances)
        time.sleep(4)
        assert {instance.port: instance.me()["id"] for instance in instances} == before
        assert not any(
            instance.lines("instance.gone") or instance.lines("instance.identity_lost") for instance in instances
        )


def test_no_instance_is_declared_gone_because_of_a_failover_to_the_standby(
    own_postgres: Postgres, tmp_path: Any
) -> None:
    """Advisory locks are not replicated: on the new primary all presence locks are free at first."""
    standby = own_postgres.standby(own_postgres.home.parent / "standby")
    both = (
        f"host=127.0.0.1,127.0.0.1 port={own_postgres.port},{standby.port} user=postgres dbname=postgres "
        f"target_session_attrs=read-write"
    )
    try:
        with Fleet(both, tmp_path) as fleet:
            instances = fleet.start(3)
            leader_of(instances)
            before = {instance.port: instance.me()["id"] for instance in instances}
            with own_postgres.session() as primary, standby.session() as replica:
                (written,) = primary.execute("SELECT pg_current_wal_lsn()").fetchone() or ("0/0",)
                replayed = "SELECT pg_last_wal_replay_lsn() >= %s::pg_lsn"
                eventually(lambda: replica.execute(replayed, [written]).fetchone() == (True,))
            own_postgres.stop("immediate")
            standby.promote()
            for instance in instances:
                instance.wait_ready()
            leader_of(instances)
            time.sleep(4)
            assert {instance.port: instance.me()["id"] for instance in instances} == before
            assert not any(
                instance.lines("instance.gone") or instance.lines("instance.identity_lost") for instance in instances
            )
    finally:
        standby.destroy()


def test_the_link_and_the_pool_leave_a_demoted_primary(own_postgres: Postgres, tmp_path: Any) -> None:
    """The former primary still answers queries and refuses only writes: the heartbeat detects that first."""
    standby = own_postgres.standby(own_postgres.home.parent / "standby")
    both = f"host=127.0.0.1,127.0.0.1 port={own_postgres.port},{standby.port} user=postgres dbname=postgres"
    try:
        with Fleet(both, tmp_path) as fleet:
            (instance,) = fleet.start()
            before = instance.me()["id"]
            own_postgres.set("default_transaction_read_only", "on")
            standby.promote()
            eventually(lambda: instance.lines("link.up"))
            instance.wait_ready()
            assert instance.me()["id"] == before
            with standby.session() as session:
                held = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = %s"
                assert session.execute(held, [before]).fetchone() == (1,)
    finally:
        standby.destroy()


def test_an_instance_that_dies_during_an_outage_is_declared_gone_after_it(
    own_postgres: Postgres, tmp_path: Any
) -> None:
    with Fleet(own_postgres.address_of(), tmp_path) as fleet:
        instances = fleet.start(2)
        victim = leader_of(instances)
        name = victim.me()["name"]
        own_postgres.stop("immediate")
        victim.kill()
        own_postgres.start_again()

        (survivor,) = others(instances, victim)
        survivor.wait_ready()
        eventually(lambda: row(survivor, name)["state"] == "gone")


def test_no_instance_is_declared_gone_because_one_backend_of_the_server_crashes(
    own_postgres: Postgres, tmp_path: Any
) -> None:
    """After the crash of one backend, the server ends all sessions and recovers, and its start time does not change."""
    with Fleet(own_postgres.address_of(), tmp_path) as fleet:
        instances = fleet.start(3)
        leader_of(instances)
        before = {instance.port: instance.me()["id"] for instance in instances}
        with own_postgres.session() as session:
            victim = session.info.backend_pid
            import os
            import signal

            os.kill(victim, signal.SIGKILL)
            eventually(lambda: all(instance.lines("link.lost") for instance in instances))
        for instance in instances:
            instance.wait_ready()
        time.sleep(4)
        assert {instance.port: instance.me()["id"] for instance in instances} == before
        assert not any(instance.lines("instance.gone") for instance in instances)


def test_an_instance_with_a_blocked_event_loop_is_not_declared_gone(fleet: Fleet) -> None:
    busy, witness = fleet.start(2)
    # On a starved machine, the whole process may get no CPU time for as long as the lease: it is rightly declared gone.
    # A blocked event loop alone must not do that. If heartbeats needed it, each of these times would fail.
    assert any(stays_itself_while_blocked(busy, witness) for _ in range(3))


def stays_itself_while_blocked(busy: InstanceProcess, witness: InstanceProcess) -> bool:
    before = busy.wait_ready().me()
    losses = len(busy.lines("link.lost"))
    beats, same = 0, True
    with blocked(busy, seconds=2 * LEASE) as request:
        began = time.monotonic()
        while request.is_alive():
            seen = row(witness, before["name"])
            same &= seen["state"] == "ready" and seen["id"] == before["id"]
            # The heartbeat is recent, although the event loop has been blocked for longer than its age.
            beats += seen["heartbeat_age_ms"] / 1000 < time.monotonic() - began - LEASE
            time.sleep(0.1)
    same &= busy.wait_ready().me()["id"] == before["id"]
    return bool(beats) and same and len(busy.lines("link.lost")) == losses
