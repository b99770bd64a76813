"""The registry: names, presence locks, and declarations, with interleaved statements of two sessions."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace
from uuid import uuid4

import psycopg
import pytest

from app.fleet.cluster import registry
from app.fleet.cluster.registry import GRACE, Identity, Registration, Registry, Session
from app.fleet.cluster.registry_statements import FIND_STATE, TRY_PRESENCE_LOCK
from app.fleet.db import migrations
from app.fleet.db.direct import DirectSession, open_session
from app.fleet.db.dsn import pool_application
from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.errors import InstanceUnknown, NameTaken, WorkspaceTaken
from tests.support.postgres import BOUND, eventually
from tests.support.service import service

POSTGRES_VERSIONS = (18, 16)
NAMESPACE = Namespace("flotilla")
SET_GONE = Statement("UPDATE {schema}.instances SET state = 'gone' WHERE id = %(id)s")


def registration(name: str | None = None, **more: object) -> Registration:
    values = {"run_id": uuid4(), "hostname": "here", "pid": 1, "version": "test", "connections": 12}
    return Registration(name=name, **{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def migrated_address(address: str) -> str:
    migrations.migrate(address, NAMESPACE)
    return address


@contextmanager
def session(address: str) -> Iterator[DirectSession]:
    with open_session(address, application="test", lease=None) as own:
        yield own


@pytest.fixture
def ours(migrated_address: str) -> Iterator[DirectSession]:
    with session(migrated_address) as own:
        yield own


@pytest.fixture
def theirs(migrated_address: str) -> Iterator[DirectSession]:
    with session(migrated_address) as own:
        yield own


REGISTRY = Registry(NAMESPACE)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, PostgreSQL may answer later than the link of an instance would wait."""
    monkeypatch.setattr(DirectSession, "patience", BOUND)


def state(witness: Session, identifier: int) -> str:
    row = witness.execute(NAMESPACE.sql(FIND_STATE), {"id": identifier})
    found = row.fetchone()
    assert found is not None
    return str(found[0])


def join_and_end_session(migrated_address: str, witness: Session) -> Identity:
    """Join an instance and end its session; return when the server has noticed the end."""
    with session(migrated_address) as dying:
        identity = REGISTRY.join(dying, registration(), "ready")
    eventually(lambda: identity.id in REGISTRY.unlinked(witness))
    return identity


def test_the_row_of_an_instance_is_never_visible_without_its_presence_lock(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    """Another session reads all the time while a hundred instances join."""
    seen: list[int] = []
    done = threading.Event()

    def read_unlinked() -> None:
        while not done.is_set():
            seen.extend(REGISTRY.unlinked(theirs))

    reader = threading.Thread(target=read_unlinked)
    reader.start()
    sessions = []
    for _ in range(100):
        sessions.append(open_session(migrated_address, application="test", lease=None))
        REGISTRY.join(sessions[-1], registration(), "ready")
    done.set()
    reader.join()
    for each in sessions:
        each.close()
    assert not seen
    assert ours


def test_a_living_instance_cannot_be_declared_gone(ours: DirectSession, theirs: DirectSession) -> None:
    identity = REGISTRY.join(ours, registration(), "ready")
    assert REGISTRY.declare_gone(theirs, identity.id, "a mistake") is None
    assert state(theirs, identity.id) == "ready"


def test_a_dead_instance_is_declared_gone_only_once(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = join_and_end_session(migrated_address, ours)
    assert list(REGISTRY.unlinked(ours)) == [identity.id]
    assert REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name
    assert REGISTRY.declare_gone(theirs, identity.id, "again") is None
    assert REGISTRY.unlinked(ours) == {}


def test_an_instance_that_reconnects_during_its_declaration_reads_that_it_is_gone(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = join_and_end_session(migrated_address, ours)
    with theirs.transaction():
        theirs.execute(NAMESPACE.sql(TRY_PRESENCE_LOCK), {"key": identity.id})
        # The declaration is being written. The instance reconnects now, and must not take its lock before the commit.
        assert not REGISTRY.take_presence_lock(ours, identity.id)
        theirs.execute(
            NAMESPACE.sql(SET_GONE),
            {"id": identity.id},
        )
    assert REGISTRY.take_presence_lock(ours, identity.id)
    assert not REGISTRY.relink(ours, identity)
    assert REGISTRY.heartbeat(ours, identity, "ready", 0) is None


def test_an_instance_that_reconnects_before_its_declaration_prevents_it(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = join_and_end_session(migrated_address, ours)
    # The leader read that the lock was free. Before it declares the instance gone, the link is up again.
    assert identity.id in REGISTRY.unlinked(theirs)
    assert REGISTRY.take_presence_lock(ours, identity.id)
    assert REGISTRY.declare_gone(theirs, identity.id, "its session ended") is None
    assert REGISTRY.relink(ours, identity)


def test_callbacks_of_a_declaration_commit_with_it_or_roll_it_back(migrated_address: str, ours: DirectSession) -> None:
    ours.execute("CREATE TABLE freed (id int)")

    def free(connection: Session, identifiers: object) -> None:
        assert isinstance(identifiers, list)
        connection.execute("INSERT INTO freed VALUES (%s)", [identifiers[0]])

    def fail(_: Session, __: object) -> None:
        raise RuntimeError("a hook that fails")

    identity = join_and_end_session(migrated_address, ours)
    with pytest.raises(RuntimeError, match="a hook that fails"):
        Registry(NAMESPACE, [free, fail]).declare_gone(ours, identity.id, "its session ended")
    assert state(ours, identity.id) == "ready"
    assert ours.execute("SELECT * FROM freed").fetchall() == []

    Registry(NAMESPACE, [free]).declare_gone(ours, identity.id, "its session ended")
    assert ours.execute("SELECT * FROM freed").fetchall() == [(identity.id,)]


def test_callbacks_for_a_gone_instance_run_once_whether_it_left_or_was_declared_gone(
    ours: DirectSession, theirs: DirectSession
) -> None:
    deaths: list[object] = []
    register = Registry(NAMESPACE, [lambda _, identifiers: deaths.extend(identifiers)])
    identity = register.join(ours, registration(), "ready")
    theirs.execute(NAMESPACE.sql(SET_GONE), {"id": identity.id})
    register.leave(ours, identity.id, "left", [])
    assert deaths == [], "it was declared gone while it was leaving, and the declaration ran the callbacks"

    other = register.join(ours, registration(), "ready")
    register.leave(ours, other.id, "left", [])
    register.leave(ours, other.id, "left", [])
    assert deaths == [other.id]


def pool_session(address: str, identity: Identity) -> DirectSession:
    """Open a session as the pool of the instance does."""
    return open_session(address, application=pool_application(NAMESPACE, identity.run_id), lease=None)


CLAIM = """
SELECT repeat('x', 1000000)
FROM (SELECT id FROM flotilla.instances WHERE id = %s AND state <> 'gone' FOR KEY SHARE) AS me, generate_series(1, 100)
"""


def test_an_instance_that_was_frozen_while_it_received_a_claim_is_declared_gone(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    """Its backend has the locks of the claim and waits for the client, and no timeout of the server ends that wait."""
    identity = REGISTRY.join(theirs, registration(), "ready")
    with closing(pool_session(migrated_address, identity)) as frozen:
        backend = frozen.info.backend_pid
        # The query is sent and its result not read, as if the process were frozen at this moment.
        frozen.pgconn.send_query((CLAIM % identity.id).encode())
        wait_event = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: ours.execute(wait_event, [backend]).fetchone() == ("ClientWrite",))
        theirs.close()
        eventually(lambda: identity.id in REGISTRY.unlinked(ours))
        eventually(lambda: REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name)
        # A backend releases its locks a moment before it leaves the list.
        eventually(lambda: ours.execute(wait_event, [backend]).fetchone() is None)


@pytest.mark.anyio
async def test_the_sessions_of_a_pool_have_the_run_id_of_their_instance_in_their_name(address: str) -> None:
    """A declaration finds the sessions by this name. The timeout ends a session whose client does not read."""
    async with service(address, statement_timeout=7.0) as running:
        me = running.context.member.identity
        assert me is not None
        async with running.context.database.connection() as connection:
            shown = "SELECT current_setting('application_name'), current_setting('tcp_user_timeout')"
            assert await (await connection.execute(shown)).fetchall() == [
                (pool_application(NAMESPACE, me.run_id), "7000")
            ]


def test_a_declaration_ends_only_sessions_of_the_instance_that_block_it(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    with session(migrated_address) as dying:
        identity = REGISTRY.join(dying, registration(), "ready")
    neighbour = REGISTRY.join(theirs, registration(), "ready")
    eventually(lambda: identity.id in REGISTRY.unlinked(ours))
    with pool_session(migrated_address, identity) as idle, pool_session(migrated_address, neighbour) as holder:
        idle.execute("BEGIN")
        idle.execute("SELECT 1")
        with holder.transaction():
            # As the forced release of a lock for which the dead instance waited.
            holder.execute("SELECT FROM flotilla.instances WHERE id = %s FOR KEY SHARE", [identity.id])
            assert REGISTRY.declare_gone(ours, identity.id, "its session ended") is None
        assert REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name
        idle.execute("COMMIT")


def test_a_name_is_unique_among_living_instances_and_free_after_the_grace_period(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    with session(migrated_address) as first:
        holder = REGISTRY.join(first, registration("harbour"), "ready")
        with pytest.raises(NameTaken, match=rf"id {holder.id}, pid 1 on here"):
            REGISTRY.join(ours, registration("harbour"), "ready")
    # Otherwise it would still be taken for a living instance.
    eventually(lambda: holder.id in REGISTRY.unlinked(ours))
    began = time.monotonic()
    heir = REGISTRY.join(theirs, registration("harbour"), "ready")
    assert heir.id > holder.id
    assert time.monotonic() - began >= GRACE, (
        "an instance whose link had only broken would have had no time to reconnect"
    )


def test_an_instance_that_reconnects_in_its_grace_period_keeps_its_name(
    migrated_address: str, ours: DirectSession, theirs: DirectSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session(migrated_address) as first:
        holder = REGISTRY.join(first, registration("harbour"), "ready")
    eventually(lambda: holder.id in REGISTRY.unlinked(ours))
    reconnected: list[bool] = []

    def reconnect(_: float) -> None:
        """Reconnect while the other instance waits: on a busy machine, a thread might not do it in time."""
        reconnected.append(REGISTRY.take_presence_lock(theirs, holder.id))

    monkeypatch.setattr(registry, "time", SimpleNamespace(sleep=reconnect, monotonic=time.monotonic))
    with pytest.raises(NameTaken):
        REGISTRY.join(ours, registration("harbour"), "ready")
    assert reconnected == [True]


def test_a_generated_name_skips_the_number_of_a_configured_name(ours: DirectSession, theirs: DirectSession) -> None:
    REGISTRY.join(ours, registration("flotilla-1"), "ready")
    assert REGISTRY.join(theirs, registration(), "ready").name == "flotilla-2"


def test_joining_with_an_id_in_use_raises_instead_of_retrying_without_end(ours: DirectSession) -> None:
    """The sequence was reset, for example by restoring a part of a backup."""
    REGISTRY.join(ours, registration(), "ready")
    ours.execute(NAMESPACE.sql(Statement("SELECT setval('{schema}.instance_ids', 1, false)")))
    with pytest.raises(psycopg.errors.UniqueViolation, match="instances_pkey"):
        REGISTRY.join(ours, registration(), "ready")


def test_a_row_with_the_run_id_of_another_process_is_not_renewed_or_relinked(
    ours: DirectSession,
) -> None:
    """After a backup was restored, an id may be assigned twice; the run id differs between the two processes."""
    identity = REGISTRY.join(ours, registration(), "ready")
    ours.execute(NAMESPACE.sql(Statement("UPDATE {schema}.instances SET run_id = %(other)s")), {"other": uuid4()})
    assert REGISTRY.heartbeat(ours, identity, "ready", 0) is None
    assert not REGISTRY.relink(ours, identity)


def test_an_instance_gets_its_former_name_if_it_is_free_and_a_new_one_otherwise(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    assert REGISTRY.join(ours, registration(former_name="flotilla-9"), "ready").name == "flotilla-9"
    assert REGISTRY.join(theirs, registration(former_name="flotilla-9"), "ready").name == "flotilla-1"
    assert migrated_address


def test_a_workspace_has_one_owner_and_any_number_of_forced_users(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    owner = REGISTRY.join(ours, registration(workspace="volume"), "ready")
    with pytest.raises(WorkspaceTaken, match=f"in use by {owner.name}"):
        REGISTRY.join(theirs, registration(workspace="volume"), "ready")
    with session(migrated_address) as third:
        REGISTRY.join(theirs, registration(workspace="volume", workspace_shared=True), "ready")
        REGISTRY.join(third, registration(workspace="volume", workspace_shared=True), "ready")


def test_generated_names_fit_their_column_even_with_the_longest_namespace(address: str) -> None:
    long = Namespace("n" * 63)
    migrations.migrate(address, long)
    with session(address) as own:
        identity = Registry(long).join(own, registration(), "ready")
    assert identity.name == "n" * 61 + "-1"


def test_a_request_to_leave_to_an_unknown_instance_raises(ours: DirectSession) -> None:
    with pytest.raises(InstanceUnknown, match="flotilla list"):
        REGISTRY.request_drain(ours, "nobody", "a test")


def test_an_instance_reads_a_request_to_leave_with_its_next_heartbeat(
    ours: DirectSession, theirs: DirectSession
) -> None:
    identity = REGISTRY.join(ours, registration(), "ready")
    answer = REGISTRY.heartbeat(ours, identity, "ready", 0)
    assert answer is not None
    assert not answer.drain_requested
    REGISTRY.request_drain(theirs, identity.name, "a test")
    answer = REGISTRY.heartbeat(ours, identity, "ready", 0)
    assert answer is not None
    assert (answer.drain_requested, answer.drain_reason) == (True, "a test")


def test_the_steps_of_a_shutdown_under_way_never_replace_its_final_record(
    ours: DirectSession, theirs: DirectSession
) -> None:
    identity = REGISTRY.join(ours, registration(), "draining")
    flag = {"step": "flag", "ms": 1.0, "outcome": "done"}

    def stored() -> object:
        (instance,) = REGISTRY.list(theirs)
        return instance.shutdown

    for so_far in ([flag | {"outcome": "running"}], [flag], [flag, flag | {"step": "drain"}]):
        REGISTRY.report_shutdown(ours, identity, so_far)
        assert stored() == so_far
    # The link did not end in time, and its last statement was slow.
    REGISTRY.write_shutdown(theirs, identity.id, [flag] * 6)
    REGISTRY.report_shutdown(ours, identity, [flag] * 5)
    assert stored() == [flag] * 6
    REGISTRY.leave(ours, identity.id, "left", [flag])
    REGISTRY.report_shutdown(ours, identity, [flag, flag])
    assert stored() == [flag]


def test_only_a_former_session_that_has_the_presence_lock_is_ended(
    migrated_address: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = REGISTRY.join(ours, registration(), "ready")
    bystander = open_session(migrated_address, application="test", lease=None)
    REGISTRY.end_former_session(theirs, identity.id, bystander.info.backend_pid)
    assert bystander.execute("SELECT 1").fetchone() == (1,), "it does not have the presence lock"
    bystander.close()
    REGISTRY.end_former_session(theirs, identity.id, ours.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        ours.execute("SELECT 1")


def test_only_rows_of_instances_that_are_long_gone_are_pruned(migrated_address: str, ours: DirectSession) -> None:
    identities: list[Identity] = []
    for _ in range(3):
        identities.append(join_and_end_session(migrated_address, ours))
        REGISTRY.declare_gone(ours, identities[-1].id, "its session ended")
    ours.execute(
        NAMESPACE.sql(Statement("UPDATE {schema}.instances SET gone_at = now() - interval '8 days' WHERE id = %(id)s")),
        {"id": identities[0].id},
    )
    assert REGISTRY.prune(ours) == 1
    assert [each.id for each in REGISTRY.list(ours)] == [each.id for each in identities[1:]]


def test_lock_keys_of_different_kinds_are_distinct() -> None:
    highest = 2**28 - 1
    keys = [kind.key(number) for kind in Lock for number in (1, 2, highest)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= key < 2**31 for key in keys)
