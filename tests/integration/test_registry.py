"""The register, interleaved by hand: what two sessions may do between each other's statements."""

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from uuid import uuid4

import psycopg
import pytest

from app.fleet.cluster.registry import GRACE, Identity, Registration, Registry, Session
from app.fleet.cluster.registry_statements import FIND_STATE, TRY_PRESENCE_LOCK
from app.fleet.db import migrations
from app.fleet.db.direct import DirectSession, open_session
from app.fleet.db.dsn import pool_application
from app.fleet.db.namespace import Lock, Namespace, Statement
from app.fleet.errors import InstanceUnknown, NameTaken, WorkspaceTaken
from tests.support.postgres import eventually
from tests.support.service import service

POSTGRES_VERSIONS = (18, 16)
NAMESPACE = Namespace("flotilla")
SET_GONE = Statement("UPDATE {schema}.instances SET state = 'gone' WHERE id = %(id)s")


def wanted(name: str | None = None, **more: object) -> Registration:
    values = {"run_id": uuid4(), "hostname": "here", "pid": 1, "version": "test", "connections": 12}
    return Registration(name=name, **{**values, **more})  # type: ignore[arg-type]


@pytest.fixture
def home(address: str) -> str:
    migrations.migrate(address, NAMESPACE)
    return address


@contextmanager
def session(address: str) -> Iterator[DirectSession]:
    with open_session(address, application="test", lease=None) as own:
        yield own


@pytest.fixture
def ours(home: str) -> Iterator[DirectSession]:
    with session(home) as own:
        yield own


@pytest.fixture
def theirs(home: str) -> Iterator[DirectSession]:
    with session(home) as own:
        yield own


REGISTRY = Registry(NAMESPACE)


def state(asked: Session, identifier: int) -> str:
    row = asked.execute(NAMESPACE.sql(FIND_STATE), {"id": identifier})
    found = row.fetchone()
    assert found is not None
    return str(found[0])


def one_that_died(home: str, witness: Session) -> Identity:
    """Join and let the session end; return when the server has noticed."""
    with session(home) as dying:
        identity = REGISTRY.join(dying, wanted(), "ready")
    eventually(lambda: identity.id in REGISTRY.unlinked(witness))
    return identity


def test_a_row_is_never_there_before_its_lock(home: str, ours: DirectSession, theirs: DirectSession) -> None:
    """Somebody who looks at any moment of a hundred joinings never sees a living row without its lock."""
    seen: list[int] = []
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.extend(REGISTRY.unlinked(theirs))

    looking = threading.Thread(target=look)
    looking.start()
    sessions = []
    for _ in range(100):
        sessions.append(open_session(home, application="test", lease=None))
        REGISTRY.join(sessions[-1], wanted(), "ready")
    done.set()
    looking.join()
    for each in sessions:
        each.close()
    assert not seen
    assert ours


def test_one_that_lives_cannot_be_declared_gone(ours: DirectSession, theirs: DirectSession) -> None:
    identity = REGISTRY.join(ours, wanted(), "ready")
    assert REGISTRY.declare_gone(theirs, identity.id, "a mistake") is None
    assert state(theirs, identity.id) == "ready"


def test_one_that_died_is_declared_gone_once(home: str, ours: DirectSession, theirs: DirectSession) -> None:
    identity = one_that_died(home, ours)
    assert list(REGISTRY.unlinked(ours)) == [identity.id]
    assert REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name
    assert REGISTRY.declare_gone(theirs, identity.id, "again") is None
    assert REGISTRY.unlinked(ours) == {}


def test_a_link_that_comes_back_during_the_verdict_waits_and_then_reads_it(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = one_that_died(home, ours)
    with theirs.transaction():
        theirs.execute(NAMESPACE.sql(TRY_PRESENCE_LOCK), {"key": identity.id})
        # The verdict is being written. The one it is about comes back now, and must not get in between.
        assert not REGISTRY.take_presence_lock(ours, identity.id)
        theirs.execute(
            NAMESPACE.sql(SET_GONE),
            {"id": identity.id},
        )
    assert REGISTRY.take_presence_lock(ours, identity.id)
    assert not REGISTRY.relink(ours, identity)
    assert REGISTRY.heartbeat(ours, identity, "ready", 0) is None


def test_a_link_that_comes_back_before_the_verdict_stops_it(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = one_that_died(home, ours)
    # The leader saw the lock free; before it could decide, the link is up again.
    assert identity.id in REGISTRY.unlinked(theirs)
    assert REGISTRY.take_presence_lock(ours, identity.id)
    assert REGISTRY.declare_gone(theirs, identity.id, "its session ended") is None
    assert REGISTRY.relink(ours, identity)


def test_what_a_death_asks_for_commits_with_it_or_not_at_all(home: str, ours: DirectSession) -> None:
    ours.execute("CREATE TABLE freed (id int)")

    def free(connection: Session, identifiers: object) -> None:
        assert isinstance(identifiers, list)
        connection.execute("INSERT INTO freed VALUES (%s)", [identifiers[0]])

    def fail(_: Session, __: object) -> None:
        raise RuntimeError("a hook that fails")

    identity = one_that_died(home, ours)
    with pytest.raises(RuntimeError, match="a hook that fails"):
        Registry(NAMESPACE, [free, fail]).declare_gone(ours, identity.id, "its session ended")
    assert state(ours, identity.id) == "ready"
    assert ours.execute("SELECT * FROM freed").fetchall() == []

    Registry(NAMESPACE, [free]).declare_gone(ours, identity.id, "its session ended")
    assert ours.execute("SELECT * FROM freed").fetchall() == [(identity.id,)]


def test_what_a_death_asks_for_happens_once_whether_it_left_or_was_declared_gone(
    ours: DirectSession, theirs: DirectSession
) -> None:
    deaths: list[object] = []
    register = Registry(NAMESPACE, [lambda _, identifiers: deaths.extend(identifiers)])
    identity = register.join(ours, wanted(), "ready")
    theirs.execute(NAMESPACE.sql(SET_GONE), {"id": identity.id})
    register.leave(ours, identity.id, "left", [])
    assert deaths == [], "it was declared gone while it was leaving, and that did everything"

    other = register.join(ours, wanted(), "ready")
    register.leave(ours, other.id, "left", [])
    register.leave(ours, other.id, "left", [])
    assert deaths == [other.id]


def pool_session(address: str, identity: Identity) -> DirectSession:
    """A session as the instance's pool opens them."""
    return open_session(address, application=pool_application(NAMESPACE, identity.run_id), lease=None)


CLAIM = """
SELECT repeat('x', 1000000)
FROM (SELECT id FROM flotilla.instances WHERE id = %s AND state <> 'gone' FOR KEY SHARE) AS me, generate_series(1, 100)
"""


def test_an_instance_that_was_frozen_while_it_received_a_claim_is_declared_gone(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    """Its backend waits for it with the claim's locks, and no timeout of the server's ends that wait."""
    identity = REGISTRY.join(theirs, wanted(), "ready")
    with closing(pool_session(home, identity)) as frozen:
        backend = frozen.info.backend_pid
        # Sent, and never read: as by a process that was stopped in this moment.
        frozen.pgconn.send_query((CLAIM % identity.id).encode())
        waits = "SELECT wait_event FROM pg_stat_activity WHERE pid = %s"
        eventually(lambda: ours.execute(waits, [backend]).fetchone() == ("ClientWrite",))
        theirs.close()
        eventually(lambda: identity.id in REGISTRY.unlinked(ours))
        eventually(lambda: REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name)
        assert ours.execute(waits, [backend]).fetchone() is None


@pytest.mark.anyio
async def test_the_sessions_of_a_pool_carry_the_run_id_of_their_instance(address: str) -> None:
    """By which a verdict finds them; and none of them outlives a reader that is not there."""
    async with service(address, statement_timeout=7.0) as running:
        me = running.context.member.identity
        assert me is not None
        async with running.context.database.connection() as connection:
            shown = "SELECT current_setting('application_name'), current_setting('tcp_user_timeout')"
            assert await (await connection.execute(shown)).fetchall() == [
                (pool_application(NAMESPACE, me.run_id), "7000")
            ]


def test_a_verdict_ends_no_session_of_another_instance_and_none_that_does_not_hold_it_up(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    with session(home) as dying:
        identity = REGISTRY.join(dying, wanted(), "ready")
    neighbour = REGISTRY.join(theirs, wanted(), "ready")
    eventually(lambda: identity.id in REGISTRY.unlinked(ours))
    with pool_session(home, identity) as idle, pool_session(home, neighbour) as holder:
        idle.execute("BEGIN")
        idle.execute("SELECT 1")
        with holder.transaction():
            # As the operator's release of a lock that the dead instance waited for.
            holder.execute("SELECT FROM flotilla.instances WHERE id = %s FOR KEY SHARE", [identity.id])
            assert REGISTRY.declare_gone(ours, identity.id, "its session ended") is None
        assert REGISTRY.declare_gone(ours, identity.id, "its session ended") == identity.name
        idle.execute("COMMIT")


def test_a_name_is_unique_among_the_living_and_free_after_death(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    with session(home) as first:
        holder = REGISTRY.join(first, wanted("harbour"), "ready")
        with pytest.raises(NameTaken, match=rf"id {holder.id}, pid 1 on here"):
            REGISTRY.join(ours, wanted("harbour"), "ready")
    began = time.monotonic()
    heir = REGISTRY.join(theirs, wanted("harbour"), "ready")
    assert heir.id > holder.id
    assert time.monotonic() - began >= GRACE, "a link that was merely broken had no time to come back"


def test_a_holder_that_comes_back_in_its_grace_keeps_its_name(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    first = open_session(home, application="test", lease=None)
    holder = REGISTRY.join(first, wanted("harbour"), "ready")
    first.close()
    comeback = threading.Timer(GRACE / 3, lambda: REGISTRY.take_presence_lock(theirs, holder.id))
    comeback.start()
    with pytest.raises(NameTaken):
        REGISTRY.join(ours, wanted("harbour"), "ready")
    comeback.join()


def test_a_number_whose_name_somebody_chose_by_hand_is_skipped(ours: DirectSession, theirs: DirectSession) -> None:
    REGISTRY.join(ours, wanted("flotilla-1"), "ready")
    assert REGISTRY.join(theirs, wanted(), "ready").name == "flotilla-2"


def test_an_id_that_is_in_use_already_is_an_error_and_not_an_endless_loop(ours: DirectSession) -> None:
    """The sequence was reset, for example by restoring a part of a backup."""
    REGISTRY.join(ours, wanted(), "ready")
    ours.execute(NAMESPACE.sql(Statement("SELECT setval('{schema}.instance_ids', 1, false)")))
    with pytest.raises(psycopg.errors.UniqueViolation, match="instances_pkey"):
        REGISTRY.join(ours, wanted(), "ready")


def test_a_row_that_belongs_to_another_process_by_now_is_neither_renewed_nor_taken_up_again(
    ours: DirectSession,
) -> None:
    """A restored backup may give an id away twice; the run id tells the two processes apart."""
    identity = REGISTRY.join(ours, wanted(), "ready")
    ours.execute(NAMESPACE.sql(Statement("UPDATE {schema}.instances SET run_id = %(other)s")), {"other": uuid4()})
    assert REGISTRY.heartbeat(ours, identity, "ready", 0) is None
    assert not REGISTRY.relink(ours, identity)


def test_a_former_name_is_taken_again_if_it_is_free_and_given_up_if_not(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    assert REGISTRY.join(ours, wanted(former_name="flotilla-9"), "ready").name == "flotilla-9"
    assert REGISTRY.join(theirs, wanted(former_name="flotilla-9"), "ready").name == "flotilla-1"
    assert home


def test_a_workspace_has_one_owner_and_any_number_that_were_forced_in(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    owner = REGISTRY.join(ours, wanted(workspace="volume"), "ready")
    with pytest.raises(WorkspaceTaken, match=f"in use by {owner.name}"):
        REGISTRY.join(theirs, wanted(workspace="volume"), "ready")
    with session(home) as third:
        REGISTRY.join(theirs, wanted(workspace="volume", workspace_shared=True), "ready")
        REGISTRY.join(third, wanted(workspace="volume", workspace_shared=True), "ready")


def test_a_long_namespace_still_gives_names_that_fit(address: str) -> None:
    long = Namespace("n" * 63)
    migrations.migrate(address, long)
    with session(address) as own:
        identity = Registry(long).join(own, wanted(), "ready")
    assert identity.name == "n" * 61 + "-1"


def test_asking_somebody_unknown_to_leave_says_so(ours: DirectSession) -> None:
    with pytest.raises(InstanceUnknown, match="flotilla list"):
        REGISTRY.request_drain(ours, "nobody", "a test")


def test_a_request_to_leave_is_read_from_the_row_at_the_next_beat(ours: DirectSession, theirs: DirectSession) -> None:
    identity = REGISTRY.join(ours, wanted(), "ready")
    answer = REGISTRY.heartbeat(ours, identity, "ready", 0)
    assert answer is not None
    assert not answer.drain_requested
    REGISTRY.request_drain(theirs, identity.name, "a test")
    answer = REGISTRY.heartbeat(ours, identity, "ready", 0)
    assert answer is not None
    assert (answer.drain_requested, answer.drain_reason) == (True, "a test")


def test_a_former_session_that_still_holds_our_presence_is_ended_and_no_other(
    home: str, ours: DirectSession, theirs: DirectSession
) -> None:
    identity = REGISTRY.join(ours, wanted(), "ready")
    bystander = open_session(home, application="test", lease=None)
    REGISTRY.end_former_session(theirs, identity.id, bystander.info.backend_pid)
    assert bystander.execute("SELECT 1").fetchone() == (1,), "it holds no presence of ours"
    bystander.close()
    REGISTRY.end_former_session(theirs, identity.id, ours.info.backend_pid)
    with pytest.raises(psycopg.OperationalError):
        ours.execute("SELECT 1")


def test_only_rows_long_gone_are_pruned(home: str, ours: DirectSession) -> None:
    identities: list[Identity] = []
    for _ in range(3):
        identities.append(one_that_died(home, ours))
        REGISTRY.declare_gone(ours, identities[-1].id, "its session ended")
    ours.execute(
        NAMESPACE.sql(Statement("UPDATE {schema}.instances SET gone_at = now() - interval '8 days' WHERE id = %(id)s")),
        {"id": identities[0].id},
    )
    assert REGISTRY.prune(ours) == 1
    assert [each.id for each in REGISTRY.list(ours)] == [each.id for each in identities[1:]]


def test_lock_keys_of_different_kinds_never_meet() -> None:
    highest = 2**28 - 1
    keys = [kind.key(number) for kind in Lock for number in (1, 2, highest)]
    assert len(set(keys)) == len(keys)
    assert all(-(2**31) <= key < 2**31 for key in keys)
