"""Locks between real processes: whoever is killed, frozen or cut off, effects stay in the order of their tokens."""

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
    """The tokens of effects and who left them, in the order in which they were written."""
    with psycopg.connect(address) as session:
        return session.execute(
            "SELECT token, instance FROM public.effects WHERE note = %s ORDER BY n", [note]
        ).fetchall()


def holder_of(instance: InstanceProcess, name: str) -> str | None:
    held = {lock["name"]: lock for lock in instance.client.get("/locks").json()["items"]}
    return held[name]["instance"] if name in held else None


def runs_it(instances: Sequence[InstanceProcess], name: str) -> InstanceProcess:
    """The one that holds a lock, once somebody does."""

    def find() -> InstanceProcess | None:
        holder = holder_of(instances[0], name)
        return next((instance for instance in instances if instance.me()["name"] == holder), None)

    return eventually(find)


def test_a_lock_of_a_killed_instance_is_passed_on_with_its_death(fleet: Fleet) -> None:
    instances = fleet.start(2)
    instances[0].trigger("hold-lock")
    owner = runs_it(instances, "trial")
    other = next(instance for instance in instances if instance is not owner)
    assert by_name(other.instances())[owner.me()["name"]]["locks"] == ["trial"]
    # It lands anywhere: with its lock's owner, it dies too, and is taken over.
    waits = other.trigger("note-under-lock")
    eventually(lambda: other.client.get("/locks").json()["items"][0]["waiting"] == 1)
    owner.kill()
    assert other.ended(waits["id"])["state"] == "succeeded"
    ((token, _),) = effects(fleet.address, "locked")
    assert token >= 2


@pytest.mark.parametrize("guarded", [True, False])
def test_a_holder_that_was_frozen_writes_nothing_guarded_after_the_next_one(fleet: Fleet, guarded: bool) -> None:
    """And without its guard, it does: the lock alone is not what keeps it from that."""
    instances = fleet.start(2)
    late = instances[0].trigger("note-under-lock", {"late": True, "guarded": guarded})
    owner = runs_it(instances, "trial")
    other = next(instance for instance in instances if instance is not owner)
    owner.freeze()
    try:
        # Taken over with the death of its instance, and now the next holder itself.
        assert other.ended(late["id"], within=60)["state"] == "succeeded"
        assert [token for token, _ in effects(fleet.address, "locked")] == [2]
    finally:
        owner.thaw()
    if guarded:
        eventually(lambda: owner.lines("lock.refused"))
        assert [token for token, _ in effects(fleet.address, "locked")] == [2]
    else:
        eventually(lambda: [token for token, _ in effects(fleet.address, "locked")] == [2, 1])


def test_a_singleton_runs_on_one_instance_and_moves_on_when_that_one_leaves_or_dies(fleet: Fleet) -> None:
    instances = fleet.start(3, "serve", **WITH_BEACON)
    seen = []
    for end in (InstanceProcess.terminate, InstanceProcess.kill, None):
        owner = runs_it(instances, "singleton:beacon")
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
    assert len(set(by_token.values())) == 3, "on one instance after the other"


@pytest.mark.long
def test_effects_stay_in_the_order_of_their_tokens_whatever_becomes_of_the_holders(tmp_path: Path) -> None:
    """Six strike again and again, on three instances that are killed, frozen, cut off; and the database crashes.

    Who is frozen is so for longer than a lock's `ttl`, and all wait for it; it goes on until all of this has happened,
    several times each, which is why it takes half a minute.
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


def test_an_operator_sees_who_holds_a_lock_and_takes_it_away(fleet: Fleet) -> None:
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
    # Its body is ended, as if it had raised; the next attempt has nothing to do.
    assert instance.ended(held["id"])["result"] == "another held it"
    assert run("release", "trial", "--reason", "again", address=fleet.address).returncode == 5
    with psycopg.connect(fleet.address) as session:
        audit = session.execute("SELECT name, token, reason FROM flotilla.lock_releases").fetchall()
        overlaps = session.execute("SELECT * FROM flotilla.lock_overlaps").fetchall()
    assert audit == [("trial", 1, "it hangs")]
    assert overlaps == [], "a release is no anomaly"


def test_a_lock_is_taken_away_over_http_with_a_reason_that_is_kept_with_the_name_of_the_key(fleet: Fleet) -> None:
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
