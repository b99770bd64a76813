"""The link and the queue for leadership, with observations that only the database allows."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from app.fleet.cluster import link as link_module
from app.fleet.cluster.leader import Leader
from app.fleet.cluster.link import RETRY_INTERVAL, Callbacks, Link, clock
from app.fleet.cluster.registry import BATCH, RELINK_GRACE, Identity, Registration, Registry, Session
from app.fleet.db import migrations
from app.fleet.db.direct import DirectSession, open_session
from app.fleet.db.namespace import Namespace
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.errors import FleetError, NameTaken
from tests.support.postgres import BOUND, Postgres, eventually
from tests.support.proxy import Proxy

POSTGRES_VERSIONS = (18, 16)
NAMESPACE = Namespace("flotilla")
REGISTRY = Registry(NAMESPACE)
WAITS_FOR_A_ROW = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"


@pytest.fixture
def migrated_address(address: str) -> str:
    migrations.migrate(address, NAMESPACE)
    return address


@contextmanager
def linked(address: str, callbacks: Callbacks | None = None, name: str | None = None) -> Iterator[Link]:
    registration = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12, name=name)
    link = Link(address, REGISTRY, registration, callbacks or Callbacks())
    link.join()
    try:
        yield link
    finally:
        link.leave("left", [], 5)


@contextmanager
def queued(address: str, link: Link) -> Iterator[Leader]:
    leader = Leader(address, REGISTRY, link)
    leader.start()
    try:
        yield leader
    finally:
        leader.step_down()
        leader.join(5)


def leading(leaders: list[Leader]) -> list[Leader]:
    return [each for each in leaders if each.leading]


def test_neither_the_leader_nor_its_candidates_hold_a_snapshot_or_delay_index_builds(migrated_address: str) -> None:
    """A plain wait for an advisory lock would hold a snapshot for as long as it waits."""
    with (
        linked(migrated_address) as one,
        linked(migrated_address) as two,
        queued(migrated_address, one) as first,
        queued(migrated_address, two) as second,
    ):
        eventually(lambda: leading([first, second]))
        with psycopg.connect(migrated_address, autocommit=True) as session:
            find = (
                "SELECT wait_event_type = 'Lock', backend_xmin IS NULL, backend_xid IS NULL FROM pg_stat_activity "
                "WHERE application_name LIKE '%/turn/%' AND datname = current_database() ORDER BY 1 NULLS FIRST"
            )

            def one_leads_and_one_waits_without_a_snapshot() -> bool:
                rows = session.execute(find).fetchall()
                # The leader executes a check now and then, so this is repeated until both sessions are idle.
                return len(rows) == 2 and rows[-1][0] is True and all(row[1:] == (True, True) for row in rows)

            eventually(one_leads_and_one_waits_without_a_snapshot)
            session.execute("CREATE TABLE big AS SELECT generate_series(1, 100) AS n")
            session.execute(f"SET statement_timeout = '{BOUND:g}s'")
            session.execute("CREATE INDEX CONCURRENTLY ON big (n)")


def test_a_migration_can_alter_the_table_of_the_instances_while_there_is_a_leader(migrated_address: str) -> None:
    """The leader's checks read it, in a transaction that lasts for the whole term."""
    with linked(migrated_address) as link, queued(migrated_address, link) as leader:
        eventually(lambda: leader.leading and leader.checks > 2)
        with psycopg.connect(migrated_address, autocommit=True) as session:
            session.execute("SET lock_timeout = '2s'")
            session.execute("ALTER TABLE flotilla.instances ADD COLUMN rig text")
        checks = leader.checks
        eventually(lambda: leader.checks > checks + 2)
        assert leader.terms == 1


def test_the_next_candidate_leads_as_soon_as_the_leader_steps_down(migrated_address: str) -> None:
    with linked(migrated_address) as one, linked(migrated_address) as two, queued(migrated_address, one) as first:
        eventually(lambda: first.leading)
        with queued(migrated_address, two) as second, psycopg.connect(migrated_address, autocommit=True) as session:
            eventually(lambda: candidates(session) == 1)
            assert not second.leading
            first.step_down()
            eventually(lambda: second.leading)
            assert not first.leading


def candidates(session: Session) -> int:
    """How many instances wait in the queue for leadership."""
    find = "SELECT count(*) FROM pg_locks WHERE relation = 'flotilla.leader_turn'::regclass AND NOT granted"
    row = session.execute(find).fetchone()
    assert row is not None
    return int(row[0])


def test_a_leader_stops_being_leader_in_memory_as_soon_as_it_steps_down(
    migrated_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may make the next candidate the leader before this one has noticed that its session ended."""
    noticed = threading.Event()
    change = Leader._set_leading

    def notice_late(self: Leader, leading: bool) -> None:
        if not leading:
            noticed.wait(10)
        change(self, leading)

    monkeypatch.setattr(Leader, "_set_leading", notice_late)
    with linked(migrated_address) as one, queued(migrated_address, one) as leader:
        eventually(lambda: leader.leading)
        leader.step_down()
        assert not leader.leading
        noticed.set()


def test_a_cut_off_leader_stops_being_leader_before_the_server_ends_its_session(
    migrated_address: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the clock can end it: the thread of the leader waits for a response that does not come."""
    monkeypatch.setattr(DirectSession, "patience", property(lambda _: None, lambda *_: None))
    with Proxy(("127.0.0.1", postgres.port)) as proxy, linked(migrated_address) as link:
        name = migrated_address.rpartition("/")[2]
        with (
            queued(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}", link) as leader,
            psycopg.connect(migrated_address, autocommit=True) as session,
        ):
            eventually(lambda: leader.leading)
            proxy.swallow()
            eventually(lambda: not leader.leading)
            assert leading_backend(session) is not None, "the server ended the session first"
            proxy.cut()


def test_a_leader_declares_an_instance_gone_when_the_server_accepts_no_new_session(
    migrated_address: str, postgres: Postgres
) -> None:
    """For example at max_connections. The leader has had the sessions that it needs since its term began."""
    with leader_and_another(migrated_address) as (_, session, theirs, other), postgres.session() as operator:
        eventually(lambda: session.execute("SELECT FROM flotilla.leader_terms").fetchall())
        name = migrated_address.rpartition("/")[2]
        operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            theirs.close()
            eventually(lambda: not is_living(session, other))
        finally:
            operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_a_leader_without_a_session_for_writing_stays_leader_and_tries_again(
    migrated_address: str, postgres: Postgres
) -> None:
    """Its position in the queue is a session too, and after giving it up the leader could not open another one."""
    with (
        linked(migrated_address) as one,
        linked(migrated_address) as two,
        queued(migrated_address, one) as first,
        psycopg.connect(migrated_address, autocommit=True) as session,
        open_session(migrated_address, application="test", lease=None) as theirs,
        postgres.session() as operator,
    ):
        eventually(lambda: first.leading)
        other = REGISTRY.join(theirs, Registration(uuid4(), "there", 2, "test", 12), "ready")
        with queued(migrated_address, two) as second:
            eventually(lambda: candidates(session) == 1)
            name = migrated_address.rpartition("/")[2]
            operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            try:
                first.step_down()
                theirs.close()
                eventually(lambda: second.leading)
                checks = second.checks
                # The first few checks are within the grace period of the dead instance.
                eventually(lambda: second.checks > checks + 10)
                assert second.leading
                assert second.terms == 1
                assert is_living(session, other.id)
            finally:
                operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            eventually(lambda: not is_living(session, other.id))
            assert second.terms == 1


def test_there_is_at_most_one_leader_during_many_changes_of_leadership(migrated_address: str) -> None:
    with linked(migrated_address) as one, linked(migrated_address) as two, linked(migrated_address) as three:
        leaders = [Leader(migrated_address, REGISTRY, link) for link in (one, two, three)]
        for each in leaders:
            each.start()
        with psycopg.connect(migrated_address, autocommit=True) as session:
            for _ in range(10):
                backend = eventually(lambda: leading_backend(session))
                session.execute("SELECT pg_terminate_backend(%s)", [backend])
                hand_over_from(session, backend)
        for each in leaders:
            each.step_down()
            each.join(5)


def leading_backend(session: psycopg.Connection[tuple[object, ...]]) -> int | None:
    """Return the backend of the leader, or None. Fail if there are two leaders."""
    leaders = [each.id for each in REGISTRY.list(session) if each.leader]
    assert len(leaders) <= 1
    found = session.execute("SELECT turn_pid FROM flotilla.instances WHERE id = ANY(%s)", [leaders]).fetchone()
    return None if found is None else int(str(found[0]))


def hand_over_from(session: psycopg.Connection[tuple[object, ...]], backend: int) -> None:
    eventually(lambda: leading_backend(session) not in {None, backend})


def is_living(session: Session, identifier: int) -> bool:
    return not REGISTRY.is_gone(session, identifier)


def test_after_a_server_restart_an_instance_has_time_to_take_its_presence_lock_again(migrated_address: str) -> None:
    """The row has the start time of the server that granted the lock; after a restart, a free lock proves nothing."""
    with linked(migrated_address) as link, psycopg.connect(migrated_address, autocommit=True) as session:
        dying = open_session(migrated_address, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        session.execute("UPDATE flotilla.instances SET server_started_at = now() - interval '1 day' WHERE id = 2")
        assert other.id == 2
        dying.close()
        began = time.monotonic()
        with queued(migrated_address, link):
            eventually(lambda: not is_living(session, other.id))
            assert time.monotonic() - began > RELINK_GRACE * 0.8


@contextmanager
def leader_and_another(migrated_address: str) -> Iterator[tuple[Link, Session, DirectSession, int]]:
    """Yield the link of a leader, a session for queries, and the session and id of another living instance."""
    with (
        linked(migrated_address) as link,
        queued(migrated_address, link) as leader,
        psycopg.connect(migrated_address, autocommit=True) as session,
        open_session(migrated_address, application="test", lease=None) as theirs,
    ):
        eventually(lambda: leader.leading)
        other = REGISTRY.join(theirs, Registration(uuid4(), "there", 2, "test", 12), "ready")
        yield link, session, theirs, other.id


def test_a_leader_whose_own_link_has_just_broken_waits_before_it_declares_an_instance_gone(
    migrated_address: str,
) -> None:
    """The cause may have ended all sessions: a crash of the server does not change the start time of the server."""
    with leader_and_another(migrated_address) as (link, session, theirs, other):
        session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%/link/%'")
        eventually(lambda: link.relinks >= 1)
        theirs.close()
        eventually(lambda: not is_living(session, other))
        # Counted from the break, and not from now on: on a busy machine, a part of the grace may be over already.
        assert link.relinked_at is not None
        assert clock() - link.relinked_at > RELINK_GRACE * 0.8


def test_a_free_presence_lock_normally_means_that_the_instance_is_declared_gone_at_once(
    migrated_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.fleet.cluster.leader.RELINK_GRACE", 3600)
    with leader_and_another(migrated_address) as (_, session, theirs, other):
        theirs.close()
        eventually(lambda: not is_living(session, other))


def test_a_leader_tries_again_if_a_callback_of_the_declaration_raises(migrated_address: str) -> None:
    tries: list[int] = []

    def fail_once(_: Session, identifiers: Sequence[int]) -> None:
        tries.extend(identifiers)
        if len(tries) == 1:
            raise RuntimeError("a defect in another module")

    with linked(migrated_address) as link, psycopg.connect(migrated_address, autocommit=True) as session:
        dying = open_session(migrated_address, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        leader = Leader(migrated_address, Registry(NAMESPACE, [fail_once]), link)
        leader.start()
        dying.close()
        eventually(lambda: not is_living(session, other.id))
        assert tries[:2] == [other.id, other.id]
        eventually(lambda: leader.leading)
        leader.step_down()
        leader.join(5)


def test_runs_of_a_gone_instance_are_rescued_in_batches_after_a_short_first_transaction(
    migrated_address: str,
) -> None:
    """The declaration must commit within the patience of its session, however many runs the instance has."""
    steps: list[object] = []
    rescue = Rescue(NAMESPACE)

    def counted(session: Session, dead: Sequence[int]) -> bool:
        more = rescue(session, dead)
        steps.append(session.execute("SELECT count(*) FROM flotilla.runs WHERE state = 'pending'").fetchone())
        return more

    with linked(migrated_address) as link, psycopg.connect(migrated_address, autocommit=True) as session:
        dying = open_session(migrated_address, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        session.execute(
            "INSERT INTO flotilla.runs (action_id, state, priority, run_at, instance_id, max_attempts, trigger) "
            "SELECT 1, 'running', 0, now(), %s, 1, 'code' FROM generate_series(1, %s)",
            [other.id, 2 * BATCH + 500],
        )
        dying.close()
        leader = Leader(migrated_address, Registry(NAMESPACE, [counted]), link)
        leader.start()
        eventually(lambda: len(steps) == 3)
        leader.step_down()
        # The last step may not be committed yet.
        leader.join(BOUND)
        assert steps == [(BATCH,), (2 * BATCH,), (2 * BATCH + 500,)]
        assert session.execute("SELECT DISTINCT state, deaths FROM flotilla.runs").fetchall() == [("pending", 1)]


def test_the_link_gives_up_a_silent_server_before_the_lease_ends(migrated_address: str, postgres: Postgres) -> None:
    """Packets are acknowledged and the server does not respond: no TCP timer detects that, only the patience does."""
    name = migrated_address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        broken = threading.Event()
        callbacks = Callbacks(on_broken=lambda _: broken.set())
        with linked(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}?connect_timeout=2", callbacks) as link:
            before = link.identity
            assert link.holds()
            logged = len(postgres.log.read_text())
            proxy.swallow()
            eventually(lambda: not link.holds())
            assert broken.wait(60)
            proxy.heal()
            # The former session still exists and has the presence lock: the link ends that session instead of waiting.
            eventually(link.holds)
            assert link.identity == before
            log = postgres.log.read_text()[logged:]
            assert "terminating connection due to administrator command" in log
            assert "idle-session timeout" not in log, "the server ended the session first, or the link waited for that"


def test_the_link_holds_nothing_after_its_patience_even_if_its_thread_is_stuck(
    migrated_address: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stuck thread notices no error and no timeout, so the clock alone must be enough."""
    monkeypatch.setattr(DirectSession, "patience", None)
    name = migrated_address.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        broken = threading.Event()
        callbacks = Callbacks(on_broken=lambda _: broken.set())
        with linked(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}", callbacks) as link:
            logged = len(postgres.log.read_text())
            proxy.swallow()
            eventually(lambda: not link.holds())
            assert "idle-session timeout" not in postgres.log.read_text()[logged:], "the server ended the session first"
            assert not broken.is_set(), "the thread was not stuck"
            proxy.cut()


def test_a_wake_during_an_outage_does_not_end_the_pauses_between_attempts_to_reconnect(
    migrated_address: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draining instance is woken at each step. Without pauses, its link would take the CPU that the steps need."""
    attempts: list[float] = []

    def counted(*given: Any, **more: Any) -> Any:
        attempts.append(clock())
        return open_session(*given, **more)

    name = migrated_address.rpartition("/")[2]
    with (
        Proxy(("127.0.0.1", postgres.port)) as proxy,
        linked(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}") as link,
    ):
        monkeypatch.setattr(link_module, "open_session", counted)
        proxy.refuse()
        proxy.cut()
        eventually(lambda: len(attempts) > 1)
        link.wake()
        first = len(attempts)
        eventually(lambda: len(attempts) > first + 5)
        assert attempts[first + 5] - attempts[first + 1] > 3 * RETRY_INTERVAL
        proxy.heal()
        eventually(link.holds)


def test_cancelling_the_wait_for_an_announcement_does_not_end_the_link(migrated_address: str) -> None:
    """PostgreSQL was slow, and the caller has given up: the link announces the state nevertheless, and continues."""
    refused: list[FleetError] = []
    with (
        linked(migrated_address, Callbacks(on_refused=refused.append)) as link,
        psycopg.connect(migrated_address, autocommit=True) as session,
        psycopg.connect(migrated_address, autocommit=True) as other,
    ):
        with session.transaction():
            session.execute("SELECT FROM flotilla.instances FOR UPDATE")
            # The next heartbeat waits for this row.
            given_up = link.announce("ready")
            eventually(lambda: other.execute(WAITS_FOR_A_ROW).fetchall())
            assert given_up.cancel()
        link.announce("draining").result(BOUND)
        assert [each.state for each in REGISTRY.list(session)] == ["draining"]
        assert link.holds()
    assert not refused


def test_a_lost_identity_is_dropped_completely_before_the_new_one_joins(
    migrated_address: str, postgres: Postgres
) -> None:
    order: list[str] = []
    dropped = threading.Event()

    def lost(identity: Identity) -> None:
        order.append(f"lost {identity.id}")
        time.sleep(0.3)
        order.append("dropped")
        dropped.set()

    callbacks = Callbacks(on_identity_lost=lost, on_joined=lambda identity: order.append(f"joined {identity.id}"))
    with linked(migrated_address, callbacks) as link, psycopg.connect(migrated_address, autocommit=True) as session:
        former = link.identity
        assert former is not None
        session.execute("UPDATE flotilla.instances SET state = 'gone' WHERE id = %s", [former.id])
        assert dropped.wait(BOUND)
        current = eventually(lambda: link.identity)
        assert link.identities_lost == 1
    assert order == [f"joined {former.id}", f"lost {former.id}", "dropped", f"joined {current.id}"]
    assert current.id > former.id
    assert current.name == former.name
    assert current.run_id == former.run_id
    assert postgres


def test_an_instance_whose_configured_name_was_taken_in_the_meantime_leaves(migrated_address: str) -> None:
    refused: list[FleetError] = []
    callbacks = Callbacks(on_refused=refused.append)
    with (
        linked(migrated_address, callbacks, name="harbour") as link,
        psycopg.connect(migrated_address, autocommit=True) as session,
    ):
        former = link.identity
        assert former is not None
        # The instance is declared gone, and its name taken, before it can notice.
        with session.transaction():
            session.execute("UPDATE flotilla.instances SET state = 'gone' WHERE id = %s", [former.id])
            with joined_on_session(session, "harbour"):
                pass
        eventually(lambda: refused)
        assert isinstance(refused[0], NameTaken)
        assert not link.holds()


@contextmanager
def joined_on_session(session: psycopg.Connection[tuple[object, ...]], name: str) -> Iterator[None]:
    """Join as another instance with this name, on the given session, with its presence lock."""
    registration = Registration(run_id=uuid4(), hostname="there", pid=2, version="test", connections=12, name=name)
    REGISTRY.join(session, registration, "ready")
    yield


def test_a_link_that_is_refused_at_once_raises_the_reason(migrated_address: str) -> None:
    with linked(migrated_address, name="harbour"), pytest.raises(NameTaken), linked(migrated_address, name="harbour"):
        pass


def test_notifications_stay_in_their_namespace(address: str) -> None:
    received: dict[str, list[str]] = {"one": [], "two": []}
    links = []
    for name, payloads in received.items():
        namespace = Namespace(name)
        migrations.migrate(address, namespace)
        registration = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12)
        callbacks = Callbacks(on_notification=payloads.append)
        links.append(Link(address, Registry(namespace), registration, callbacks))
        links[-1].join()
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("SELECT pg_notify('one', 'for one')")
        session.execute("SELECT pg_notify('two', 'for two')")
        eventually(lambda: all(f"for {name}" in payloads for name, payloads in received.items()))
    for link in links:
        link.leave("left", [], 5)
    assert "for two" not in received["one"]
    assert "for one" not in received["two"]


def wait_for_relinks(links: list[Link], than: list[int]) -> None:
    eventually(lambda: all(link.relinks > former for link, former in zip(links, than, strict=True)))


def test_all_links_that_break_at_once_keep_their_identities(
    migrated_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine, eight new sessions take longer than usual, and the leader would declare some instances gone.
    monkeypatch.setattr("app.fleet.cluster.leader.GRACE", 10.0)
    with ThreadPoolExecutor(8) as pool:
        links = []
        for _ in range(8):
            registration = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12)
            links.append(Link(migrated_address, REGISTRY, registration, Callbacks()))
        before = list(pool.map(lambda link: link.join(), links))
        with (
            queued(migrated_address, links[0]) as leader,
            psycopg.connect(migrated_address, autocommit=True) as session,
        ):
            eventually(lambda: leader.leading)
            for _ in range(5):
                relinks = [link.relinks for link in links]
                session.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    # With or without the name of the instance, which the session sets last.
                    "WHERE application_name LIKE '%/link%' AND datname = current_database()"
                )
                wait_for_relinks(links, relinks)
        assert [link.identity for link in links] == before
        list(pool.map(lambda link: link.leave("left", [], 5), links))
