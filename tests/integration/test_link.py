"""The link and the leader's queue, one instance at a time, where something must be seen from the database's side."""

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from uuid import uuid4

import psycopg
import pytest

from app.fleet.cluster.leader import Leader
from app.fleet.cluster.link import Callbacks, Link
from app.fleet.cluster.registry import BATCH, RELINK_GRACE, Identity, Registration, Registry, Session
from app.fleet.db import migrations
from app.fleet.db.direct import DirectSession, open_session
from app.fleet.db.namespace import Namespace
from app.fleet.engine.maintenance.rescuer import Rescue
from app.fleet.errors import FleetError, NameTaken
from tests.support.postgres import Postgres, eventually
from tests.support.proxy import Proxy

POSTGRES_VERSIONS = (18, 16)
NAMESPACE = Namespace("flotilla")
REGISTRY = Registry(NAMESPACE)


@pytest.fixture
def home(address: str) -> str:
    migrations.migrate(address, NAMESPACE)
    return address


@contextmanager
def linked(address: str, callbacks: Callbacks | None = None, name: str | None = None) -> Iterator[Link]:
    wanted = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12, name=name)
    link = Link(address, REGISTRY, wanted, callbacks or Callbacks())
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


def test_neither_the_leader_nor_those_who_wait_hold_back_vacuum_or_index_builds(home: str) -> None:
    """What a plain wait for an advisory lock would do: hold a snapshot for as long as it waits."""
    with linked(home) as one, linked(home) as two, queued(home, one) as first, queued(home, two) as second:
        eventually(lambda: leading([first, second]))
        with psycopg.connect(home, autocommit=True) as session:
            find = (
                "SELECT wait_event_type = 'Lock', backend_xmin IS NULL, backend_xid IS NULL FROM pg_stat_activity "
                "WHERE application_name LIKE '%/turn/%' AND datname = current_database() ORDER BY 1 NULLS FIRST"
            )

            def one_leads_one_waits_and_neither_holds_anything() -> bool:
                rows = session.execute(find).fetchall()
                # The leader is in a look for a moment now and then; asked again until both are at rest.
                return len(rows) == 2 and rows[-1][0] is True and all(row[1:] == (True, True) for row in rows)

            eventually(one_leads_one_waits_and_neither_holds_anything)
            session.execute("CREATE TABLE big AS SELECT generate_series(1, 100) AS n")
            session.execute("SET statement_timeout = '5s'")
            session.execute("CREATE INDEX CONCURRENTLY ON big (n)")


def test_the_next_in_the_queue_leads_as_soon_as_the_leader_steps_down(home: str) -> None:
    with linked(home) as one, linked(home) as two, queued(home, one) as first:
        eventually(lambda: first.leading)
        with queued(home, two) as second, psycopg.connect(home, autocommit=True) as session:
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


def test_a_leader_does_not_call_itself_leader_from_the_moment_it_steps_down(
    home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may let the next one in before this one's thread has noticed that its session ended."""
    noticed = threading.Event()
    change = Leader._set_leading

    def notice_late(self: Leader, leading: bool) -> None:
        if not leading:
            noticed.wait(10)
        change(self, leading)

    monkeypatch.setattr(Leader, "_set_leading", notice_late)
    with linked(home) as one, queued(home, one) as leader:
        eventually(lambda: leader.leading)
        leader.step_down()
        assert not leader.leading
        noticed.set()


def test_a_leader_that_was_cut_off_stops_calling_itself_leader_before_the_server_ends_its_session(
    home: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock alone: its thread waits for an answer that does not come."""
    monkeypatch.setattr(DirectSession, "patience", property(lambda _: None, lambda *_: None))
    with Proxy(("127.0.0.1", postgres.port)) as proxy, linked(home) as link:
        name = home.rpartition("/")[2]
        with (
            queued(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}", link) as leader,
            psycopg.connect(home, autocommit=True) as session,
        ):
            eventually(lambda: leader.leading)
            proxy.swallow()
            eventually(lambda: not leader.leading)
            assert leading_backend(session) is not None, "the server let go first"
            proxy.cut()


def test_a_leader_declares_an_instance_gone_when_the_server_accepts_no_new_session(
    home: str, postgres: Postgres
) -> None:
    """At max_connections, for example. What the leader needs for a verdict, it has had since its term began."""
    with leader_and_another(home) as (_, session, theirs, other), postgres.session() as operator:
        eventually(lambda: session.execute("SELECT FROM flotilla.leader_terms").fetchall())
        name = home.rpartition("/")[2]
        operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
        try:
            theirs.close()
            eventually(lambda: not living(session, other))
        finally:
            operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')


def test_a_leader_that_gets_no_session_to_write_by_goes_on_leading_and_tries_again(
    home: str, postgres: Postgres
) -> None:
    """Its place in the queue is a session too, and one that was given up could not be had again."""
    with (
        linked(home) as one,
        linked(home) as two,
        queued(home, one) as first,
        psycopg.connect(home, autocommit=True) as session,
        open_session(home, application="test", lease=None) as theirs,
        postgres.session() as operator,
    ):
        eventually(lambda: first.leading)
        other = REGISTRY.join(theirs, Registration(uuid4(), "there", 2, "test", 12), "ready")
        with queued(home, two) as second:
            eventually(lambda: candidates(session) == 1)
            name = home.rpartition("/")[2]
            operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false')
            try:
                first.step_down()
                theirs.close()
                eventually(lambda: second.leading)
                looks = second.checks
                # The first few are within the grace of the instance that died.
                eventually(lambda: second.checks > looks + 10)
                assert second.leading
                assert second.terms == 1
                assert living(session, other.id)
            finally:
                operator.execute(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
            eventually(lambda: not living(session, other.id))
            assert second.terms == 1


def test_there_is_one_leader_at_a_time_through_many_hand_overs(home: str) -> None:
    with linked(home) as one, linked(home) as two, linked(home) as three:
        leaders = [Leader(home, REGISTRY, link) for link in (one, two, three)]
        for each in leaders:
            each.start()
        with psycopg.connect(home, autocommit=True) as session:
            for _ in range(10):
                backend = eventually(lambda: leading_backend(session))
                session.execute("SELECT pg_terminate_backend(%s)", [backend])
                hand_over_from(session, backend)
        for each in leaders:
            each.step_down()
            each.join(5)


def leading_backend(session: psycopg.Connection[tuple[object, ...]]) -> int | None:
    """The backend of the one leader; an assertion, if there were two."""
    leaders = [each.id for each in REGISTRY.list(session) if each.leader]
    assert len(leaders) <= 1
    found = session.execute("SELECT turn_pid FROM flotilla.instances WHERE id = ANY(%s)", [leaders]).fetchone()
    return None if found is None else int(str(found[0]))


def hand_over_from(session: psycopg.Connection[tuple[object, ...]], backend: int) -> None:
    eventually(lambda: leading_backend(session) not in {None, backend})


def living(session: Session, identifier: int) -> bool:
    return not REGISTRY.is_gone(session, identifier)


def seconds_until_gone(session: Session, identifier: int) -> float:
    began = time.monotonic()
    eventually(lambda: not living(session, identifier))
    return time.monotonic() - began


def test_a_lock_that_a_restart_took_away_is_given_time_to_come_back(home: str) -> None:
    """The row says on which server its lock was taken. On this one it never was, so it is no sign of death yet."""
    with linked(home) as link, psycopg.connect(home, autocommit=True) as session:
        dying = open_session(home, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        session.execute("UPDATE flotilla.instances SET server_started_at = now() - interval '1 day' WHERE id = 2")
        assert other.id == 2
        dying.close()
        began = time.monotonic()
        with queued(home, link):
            eventually(lambda: not living(session, other.id))
            assert time.monotonic() - began > RELINK_GRACE * 0.8


@contextmanager
def leader_and_another(home: str) -> Iterator[tuple[Link, Session, DirectSession, int]]:
    """A leader, a session to look with, and the session and id of another instance that lives."""
    with (
        linked(home) as link,
        queued(home, link) as leader,
        psycopg.connect(home, autocommit=True) as session,
        open_session(home, application="test", lease=None) as theirs,
    ):
        eventually(lambda: leader.leading)
        other = REGISTRY.join(theirs, Registration(uuid4(), "there", 2, "test", 12), "ready")
        yield link, session, theirs, other.id


def test_a_leader_whose_own_link_was_just_broken_judges_nobody_in_a_hurry(home: str) -> None:
    """What ended its session may have ended everyone's: a crash of the server keeps the server's start time."""
    with leader_and_another(home) as (link, session, theirs, other):
        session.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE '%/link/%'")
        eventually(lambda: link.relinks == 1)
        theirs.close()
        assert seconds_until_gone(session, other) > RELINK_GRACE * 0.5


def test_without_either_a_free_lock_is_a_death_within_moments(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.fleet.cluster.leader.RELINK_GRACE", 3600)
    with leader_and_another(home) as (_, session, theirs, other):
        theirs.close()
        eventually(lambda: not living(session, other))


def test_a_defect_in_what_a_death_asks_for_costs_a_try_and_not_the_leader(home: str) -> None:
    tries: list[int] = []

    def fail_once(_: Session, identifiers: Sequence[int]) -> None:
        tries.extend(identifiers)
        if len(tries) == 1:
            raise RuntimeError("a defect in a room above")

    with linked(home) as link, psycopg.connect(home, autocommit=True) as session:
        dying = open_session(home, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        leader = Leader(home, Registry(NAMESPACE, [fail_once]), link)
        leader.start()
        dying.close()
        seconds_until_gone(session, other.id)
        assert tries[:2] == [other.id, other.id]
        eventually(lambda: leader.leading)
        leader.step_down()
        leader.join(5)


def test_a_death_with_very_many_runs_is_a_short_transaction_and_the_leader_takes_the_rest_back_after_it(
    home: str,
) -> None:
    """The verdict must end within the patience of the session that writes it, however many runs there are."""
    steps: list[object] = []
    take_back = Rescue(NAMESPACE)

    def counted(session: Session, dead: Sequence[int]) -> bool:
        more = take_back(session, dead)
        steps.append(session.execute("SELECT count(*) FROM flotilla.runs WHERE state = 'pending'").fetchone())
        return more

    with linked(home) as link, psycopg.connect(home, autocommit=True) as session:
        dying = open_session(home, application="test", lease=None)
        other = REGISTRY.join(dying, Registration(uuid4(), "there", 2, "test", 12), "ready")
        session.execute(
            "INSERT INTO flotilla.runs (action_id, state, priority, run_at, instance_id, max_attempts, trigger) "
            "SELECT 1, 'running', 0, now(), %s, 1, 'code' FROM generate_series(1, %s)",
            [other.id, 2 * BATCH + 500],
        )
        dying.close()
        leader = Leader(home, Registry(NAMESPACE, [counted]), link)
        leader.start()
        eventually(lambda: len(steps) == 3)
        leader.step_down()
        leader.join(5)
        assert steps == [(BATCH,), (2 * BATCH,), (2 * BATCH + 500,)]
        assert session.execute("SELECT DISTINCT state, deaths FROM flotilla.runs").fetchall() == [("pending", 1)]


def test_a_server_that_stops_answering_is_given_up_before_its_lease_ends(home: str, postgres: Postgres) -> None:
    """Packets are acknowledged and nothing answers: no TCP timer sees that, only patience does."""
    name = home.rpartition("/")[2]
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
            # The former session is still there, and holds the presence: it is ended, not waited for.
            eventually(link.holds)
            assert link.identity == before
            log = postgres.log.read_text()[logged:]
            assert "terminating connection due to administrator command" in log
            assert "idle-session timeout" not in log, "the server let go first, or it was waited for"


def test_what_it_holds_ends_by_the_clock_alone_even_if_its_thread_cannot_run(
    home: str, postgres: Postgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is stuck notices nothing: no error, no timeout. The clock must be enough."""
    monkeypatch.setattr(DirectSession, "patience", None)
    name = home.rpartition("/")[2]
    with Proxy(("127.0.0.1", postgres.port)) as proxy:
        broken = threading.Event()
        callbacks = Callbacks(on_broken=lambda _: broken.set())
        with linked(f"postgresql://postgres@127.0.0.1:{proxy.port}/{name}", callbacks) as link:
            logged = len(postgres.log.read_text())
            proxy.swallow()
            eventually(lambda: not link.holds())
            assert "idle-session timeout" not in postgres.log.read_text()[logged:], "the server let go first"
            assert not broken.is_set(), "the thread was not stuck"
            proxy.cut()


def test_whoever_gave_up_waiting_for_an_announcement_does_not_end_the_link(home: str) -> None:
    """PostgreSQL was slow, and the one who asked has gone on: the link says it all the same, and lives."""
    refused: list[FleetError] = []
    with linked(home, Callbacks(on_refused=refused.append)) as link, psycopg.connect(home, autocommit=True) as session:
        with session.transaction():
            session.execute("SELECT FROM flotilla.instances FOR UPDATE")
            # The next beat waits for this row.
            given_up = link.announce("ready")
            time.sleep(0.3)
            assert given_up.cancel()
        link.announce("draining").result(10)
        assert [each.state for each in REGISTRY.list(session)] == ["draining"]
        assert link.holds()
    assert not refused


def test_a_lost_identity_is_dropped_completely_before_there_is_a_new_one(home: str, postgres: Postgres) -> None:
    order: list[str] = []
    dropped = threading.Event()

    def lost(identity: Identity) -> None:
        order.append(f"lost {identity.id}")
        time.sleep(0.3)
        order.append("dropped")
        dropped.set()

    callbacks = Callbacks(on_identity_lost=lost, on_joined=lambda identity: order.append(f"joined {identity.id}"))
    with linked(home, callbacks) as link, psycopg.connect(home, autocommit=True) as session:
        former = link.identity
        assert former is not None
        session.execute("UPDATE flotilla.instances SET state = 'gone' WHERE id = %s", [former.id])
        assert dropped.wait(10)
        current = eventually(lambda: link.identity)
        assert link.identities_lost == 1
    assert order == [f"joined {former.id}", f"lost {former.id}", "dropped", f"joined {current.id}"]
    assert current.id > former.id
    assert current.name == former.name
    assert current.run_id == former.run_id
    assert postgres


def test_a_chosen_name_that_was_taken_meanwhile_makes_the_latecomer_leave(home: str) -> None:
    refused: list[FleetError] = []
    callbacks = Callbacks(on_refused=refused.append)
    with linked(home, callbacks, name="harbour") as link, psycopg.connect(home, autocommit=True) as session:
        former = link.identity
        assert former is not None
        # Declared gone, and its name taken, before it could notice.
        with session.transaction():
            session.execute("UPDATE flotilla.instances SET state = 'gone' WHERE id = %s", [former.id])
            with linked_by_row(session, "harbour"):
                pass
        eventually(lambda: refused)
        assert isinstance(refused[0], NameTaken)
        assert not link.holds()


@contextmanager
def linked_by_row(session: psycopg.Connection[tuple[object, ...]], name: str) -> Iterator[None]:
    """Another instance of this name, presence lock and all, on the given session."""
    wanted = Registration(run_id=uuid4(), hostname="there", pid=2, version="test", connections=12, name=name)
    REGISTRY.join(session, wanted, "ready")
    yield


def test_the_link_that_is_refused_at_once_says_why(home: str) -> None:
    with linked(home, name="harbour"), pytest.raises(NameTaken), linked(home, name="harbour"):
        pass


def test_notifications_stay_in_their_namespace(address: str) -> None:
    heard: dict[str, list[str]] = {"one": [], "two": []}
    links = []
    for name, payloads in heard.items():
        namespace = Namespace(name)
        migrations.migrate(address, namespace)
        wanted = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12)
        callbacks = Callbacks(on_notification=payloads.append)
        links.append(Link(address, Registry(namespace), wanted, callbacks))
        links[-1].join()
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("SELECT pg_notify('one', 'for one')")
        session.execute("SELECT pg_notify('two', 'for two')")
        eventually(lambda: all(f"for {name}" in payloads for name, payloads in heard.items()))
    for link in links:
        link.leave("left", [], 5)
    assert "for two" not in heard["one"]
    assert "for one" not in heard["two"]


def wait_for_relinks(links: list[Link], than: list[int]) -> None:
    eventually(lambda: all(link.relinks > former for link, former in zip(links, than, strict=True)))


def test_many_links_broken_at_once_all_keep_their_identity(home: str) -> None:
    with ThreadPoolExecutor(8) as pool:
        links = []
        for _ in range(8):
            wanted = Registration(run_id=uuid4(), hostname="here", pid=1, version="test", connections=12)
            links.append(Link(home, REGISTRY, wanted, Callbacks()))
        before = list(pool.map(lambda link: link.join(), links))
        with queued(home, links[0]) as leader, psycopg.connect(home, autocommit=True) as session:
            eventually(lambda: leader.leading)
            for _ in range(5):
                relinks = [link.relinks for link in links]
                session.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    # With or without its instance's name, which it says last.
                    "WHERE application_name LIKE '%/link%' AND datname = current_database()"
                )
                wait_for_relinks(links, relinks)
        assert [link.identity for link in links] == before
        list(pool.map(lambda link: link.leave("left", [], 5), links))
