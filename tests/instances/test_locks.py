"""Locks between real processes: effects stay in the order of their tokens although holders are killed or frozen."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import psycopg
import pytest

from tests.chaos.exclusion import CONFIGURATION, strike
from tests.support.fleet import Fleet, InstanceProcess, by_name, run
from tests.support.postgres import eventually, server
from tests.support.trial_actions import EFFECTS

ACTIONS = {"FLOTILLA_ACTIONS": "tests.support.trial_actions"}
WITH_BEACON = {"FLOTILLA_ACTIONS": "tests.support.trial_actions,tests.support.trial_singletons"}
NUMBERED_EFFECTS = f"{EFFECTS}; ALTER TABLE public.effects ADD COLUMN n bigserial"
ROUNDS = 300


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with psycopg.connect(address, autocommit=True) as session:
        session.execute(NUMBERED_EFFECTS)
    with Fleet(address, tmp_path, **ACTIONS) as own:
        yield own


def effects(address: str, note: str) -> list[tuple[int, str]]:
    """Return the tokens and the instances of the effects, in the order in which they were written."""
    with psycopg.connect(address) as session:
        return session.execute(
            "SELECT token, instance FROM public.effects WHERE note = %s ORDER BY n", [note]
        ).fetchall()


def holder_of(instance: InstanceProcess, name: str) -> str | None:
    held = {lock["name"]: lock for lock in instance.client.get("/locks").json()["items"]}
    return held[name]["instance"] if name in held else None


def wait_for_holder(instances: Sequence[InstanceProcess], name: str) -> InstanceProcess:
    """Return the instance that holds a lock, once there is one."""

    def find() -> InstanceProcess | None:
        holder = holder_of(instances[0], name)
        return next((instance for instance in instances if instance.me()["name"] == holder), None)

    return eventually(find)


def test_the_lock_of_a_killed_instance_is_granted_to_the_next_waiter(fleet: Fleet) -> None:
    instances = fleet.start(2)
    instances[0].trigger("hold-lock")
    owner = wait_for_holder(instances, "trial")
    other = next(instance for instance in instances if instance is not owner)
    assert by_name(other.instances())[owner.me()["name"]]["locks"] == ["trial"]
    # Any instance may claim this run. If the lock's owner does, the run dies with it, and is rescued.
    waits = other.trigger("note-under-lock")
    eventually(lambda: other.client.get("/locks").json()["items"][0]["waiting"] == 1)
    owner.kill()
    assert other.ended(waits["id"])["state"] == "succeeded"
    ((token, _),) = effects(fleet.address, "locked")
    assert token >= 2


@pytest.mark.parametrize("guarded", [True, False])
def test_a_frozen_holder_commits_no_guarded_write_after_the_next_holder(fleet: Fleet, guarded: bool) -> None:
    """Without the guard it commits one: the lock alone does not prevent that."""
    instances = fleet.start(2)
    late = instances[0].trigger("note-under-lock", {"late": True, "guarded": guarded})
    owner = wait_for_holder(instances, "trial")
    other = next(instance for instance in instances if instance is not owner)
    owner.freeze()
    try:
        # The run was rescued when its instance was declared gone, and has taken the lock itself.
        assert other.ended(late["id"], within=60)["state"] == "succeeded"
        assert [token for token, _ in effects(fleet.address, "locked")] == [2]
    finally:
        owner.thaw()
    if guarded:
        eventually(lambda: owner.lines("lock.refused"))
        assert [token for token, _ in effects(fleet.address, "locked")] == [2]
    else:
        eventually(lambda: [token for token, _ in effects(fleet.address, "locked")] == [2, 1])


def test_a_singleton_runs_on_one_instance_and_moves_when_that_instance_leaves_or_dies(fleet: Fleet) -> None:
    instances = fleet.start(3, "serve", **WITH_BEACON)
    seen = []
    for end in (InstanceProcess.terminate, InstanceProcess.kill, None):
        owner = wait_for_holder(instances, "singleton:beacon")
        count = len(effects(fleet.address, "beacon"))
        eventually(lambda count=count: len(effects(fleet.address, "beacon")) > count + 2)  # type: ignore[misc]
        seen.append(owner)
        if end is not None:
            end(owner)
            instances.remove(owner)
    assert len({instance.pid for instance in seen}) == 3
    tokens = [token for token, _ in effects(fleet.address, "beacon")]
    assert tokens == sorted(tokens)
    by_token = dict(effects(fleet.address, "beacon"))
    assert len(set(by_token.values())) == 3, "the singleton ran on three instances, one after the other"


@pytest.mark.long
def test_guarded_effects_commit_in_the_order_of_their_tokens_despite_faults(tmp_path: Path) -> None:
    """Six runs take a lock again and again, on instances that are killed, frozen and cut off; and the database crashes.

    An instance is frozen for longer than the `ttl` of the lock. The test takes half a minute, because it ends when each
    of these events has happened several times.
    """
    with server(configuration=CONFIGURATION) as postgres:
        verdict = strike(postgres, tmp_path, rounds=ROUNDS, calm=40, seed=5)
        with postgres.session() as session:
            overlaps = session.execute("SELECT * FROM flotilla.lock_overlaps").fetchall()
    assert verdict.ends.keys() == {"succeeded"}, verdict
    assert verdict.acts.keys() == {"kill", "freeze", "cut", "crash"}, verdict
    assert verdict.effects >= ROUNDS, verdict
    assert verdict.exclusive, verdict
    assert overlaps == []


def test_the_command_line_shows_the_holder_of_a_lock_and_releases_it(fleet: Fleet) -> None:
    (instance,) = fleet.start()
    held = instance.trigger("hold-lock")
    eventually(lambda: holder_of(instance, "trial"))
    listed = run("locks", address=fleet.address)
    assert listed.returncode == 0, listed.stderr
    assert f"run/{held['id']}" in listed.stdout
    assert run("release", "trial", address=fleet.address).returncode == 2, "without a reason"
    released = run("release", "trial", "--reason", "it hangs", address=fleet.address)
    assert released.returncode == 0, released.stderr
    assert f"trial: released; {instance.me()['name']} held it with the token 1" in released.stdout
    # Its block is cancelled and raises `LockLost`; the next attempt returns at once.
    assert instance.ended(held["id"])["result"] == "another held it"
    assert run("release", "trial", "--reason", "again", address=fleet.address).returncode == 5
    with psycopg.connect(fleet.address) as session:
        audit = session.execute("SELECT name, token, reason FROM flotilla.lock_releases").fetchall()
        overlaps = session.execute("SELECT * FROM flotilla.lock_overlaps").fetchall()
    assert audit == [("trial", 1, "it hangs")]
    assert overlaps == [], "a release is no anomaly"


def test_a_forced_release_over_http_stores_the_reason_and_the_name_of_the_api_key(fleet: Fleet) -> None:
    key, line = (text.strip() for text in run("key", "ops", "--scope", "admin").stdout.splitlines()[1:4:2])
    (instance,) = fleet.start(FLOTILLA_API_KEYS=line)
    with httpx.Client(base_url=instance.url, headers={"authorization": f"Bearer {key}"}) as client:
        client.post("/actions/hold-lock/runs")
        eventually(lambda: client.get("/locks").json()["items"])
        assert client.delete("/locks/trial").status_code == 422
        released = client.delete("/locks/trial", params={"reason": "it hangs"})
        assert released.status_code == 200, released.text
        assert (released.json()["name"], released.json()["token"]) == ("trial", 1)
        gone = client.delete("/locks/trial", params={"reason": "again"})
        assert (gone.status_code, gone.json()["type"]) == (404, "/problems/not-found")
    with psycopg.connect(fleet.address) as session:
        assert session.execute("SELECT released_by FROM flotilla.lock_releases").fetchall() == [("API key ops",)]
