"""Leadership: one instance does the cluster's housekeeping, and it is replaced at once when its session ends.

Every instance (of role `web`: see below) keeps one session in the queue for the lock on the view `leader_turn`. The
holder of the lock is the leader. PostgreSQL grants the lock to the next session within milliseconds of the end of the
holder's session, whether the process ended, the instance drained, or the server ended a frozen instance's lease. No
instance in the queue polls, and a follower's session executes no statement while it waits.

Why a table lock and not `pg_advisory_lock`: a session that is blocked in a SELECT holds a snapshot for as long as it
waits, which is without end here. Vacuum could not remove newer dead rows anywhere in the database, and no index could
be built CONCURRENTLY. `LOCK TABLE` is a utility statement and takes no snapshot, provided that the catalog cache
already contains the view; `WARM_UP` makes sure of that, and a test holds it. The price: the leader's session is shown
as "idle in transaction" for its whole term. It has no snapshot, no transaction id, and between two checks no lock on a
table, so it blocks nothing (docs/decisions/0003).

Several times a second the leader runs one statement that finds all live rows whose presence lock is free. The same
statement renews the lease of the leader's session. It declares an instance gone whose lock stays free:

    the presence lock was taken                      declared gone after
    on the present server                            GRACE: a link whose backend was terminated reconnects before that
    on another server (restart, failover), or this   RELINK_GRACE: all locks were free at once, and the other
      instance's own link has just reconnected       instances need time to reconnect

An instance of role `web` queues only while no instance of another role does. It looks at every heartbeat, with a
statement on its link: if one is in the queue, it leaves the queue, or its term ends. So if the last worker dies, there
is no leader for up to a second.

No safety depends on leadership. If there were two leaders, they would do the same work twice, and each `declare_gone`
is guarded by the presence lock of the instance it is about (`registry.py`).

The leader writes on a second session, because the queue's session is inside a transaction that never commits. It keeps
that session for its whole term, so that it can declare an instance gone when the server has no free connection. The
rows that a gone instance leaves (`Registry.clean_up`) are processed in batches between two checks.

`leading` becomes false before the server can grant the lock to another instance: when it leaves the queue, and
`PATIENCE` after the last answered check was sent.

Not guaranteed: that there is a leader. While the database is unavailable, there is none.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import psycopg

from app.fleet.cluster.link import Link, clock
from app.fleet.cluster.registry import GRACE, RELINK_GRACE, Identity, Registry, Session
from app.fleet.db.direct import LEASE, PATIENCE, DirectSession, open_session
from app.fleet.db.namespace import Statement
from app.fleet.telemetry.logs import event_log
from app.fleet.telemetry.metrics import TAKEOVER
from app.fleet.telemetry.redaction import redact

CHECK_INTERVAL = 0.135
PRUNE_INTERVAL = 60.0
RETRY_INTERVAL = 0.1
DEFECT_RETRY_INTERVAL = 1.0

log = event_log(__name__)

ENTER_QUEUE = Statement(
    "UPDATE {schema}.instances SET turn_pid = pg_backend_pid() WHERE id = %(id)s AND state <> 'gone'"
)
WARM_UP = Statement("SELECT has_table_privilege('{schema}.leader_turn'::regclass, 'UPDATE')")
WAIT_FOR_TURN = Statement("LOCK TABLE {schema}.leader_turn IN EXCLUSIVE MODE")
# Whether an instance of a role that does not defer is the leader, or waits in the queue.
FIND_CANDIDATE = Statement("""
SELECT EXISTS (
    SELECT FROM {schema}.instances AS i
    JOIN pg_catalog.pg_locks AS l ON l.pid = i.turn_pid
    WHERE i.state <> 'gone' AND i.role <> 'web'
      AND l.locktype = 'relation' AND l.mode = 'ExclusiveLock'
      AND l.relation = '{schema}.leader_turn'::regclass
      AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database())
)
""")


class Leader:
    """This instance's session in the queue, and its work while it is the leader. It runs in its own thread."""

    def __init__(
        self,
        address: str,
        registry: Registry,
        link: Link,
        on_elected: Callable[[], None] = lambda: None,
        *,
        defers: bool = False,
    ) -> None:
        """`on_elected` is called in the leader's thread at the beginning of each term.

        With `defers`, the instance queues only after `defer_to_candidates` has found that no other candidate does.
        """
        self.terms = 0
        self.checks = 0
        self._address = address
        self._registry = registry
        self._link = link
        self._on_elected = on_elected
        self._leading = False
        self._trusted_until = 0.0
        self._allowed = True
        self._deferring = defers
        self._stopping = threading.Event()
        self._session: DirectSession | None = None
        self._writer: DirectSession | None = None
        self._free_since: dict[int, float] = {}
        # Instances that were declared gone in this term and whose remaining rows are not all processed.
        self._to_clean_up: deque[int] = deque()
        self._pruned_at = clock()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    @property
    def leading(self) -> bool:
        """Whether this instance is the leader, by its own clock: false before another instance can be."""
        return self._leading and not self._leaving and clock() < self._trusted_until

    @property
    def _leaving(self) -> bool:
        """Whether this instance ends its session in the queue itself."""
        return self._stopping.is_set() or self._deferring

    def start(self) -> None:
        self._thread.start()

    def step_down(self) -> None:
        """Leave the queue; callable from any thread. The next instance leads within milliseconds."""
        self._stopping.set()
        if session := self._session:
            session.hang_up()

    def defer_to_candidates(self, session: Session, _: Identity) -> None:
        """Stay out of the queue while an instance that does not defer is in it. Called at each heartbeat."""
        row = session.execute(self._registry.namespace.sql(FIND_CANDIDATE)).fetchone()
        self._deferring = row == (True,)
        if self._deferring and (mine := self._session):
            mine.hang_up()

    def join(self, timeout: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            identity = self._link.identity
            if identity is None or not self._link.holds() or self._deferring:
                self._stopping.wait(RETRY_INTERVAL)
                continue
            try:
                application = self._registry.namespace.application(f"turn/{identity.name}")
                with open_session(self._address, application=application, lease=LEASE) as session:
                    self._session = session
                    if self._wait_for_turn(session, identity):
                        self._lead(session, identity)
            except (psycopg.Error, OSError) as error:
                if not self._leaving:
                    log.debug("leader.session_lost", reason=redact(" ".join(str(error).split())))
                    self._stopping.wait(RETRY_INTERVAL)
            except Exception as error:  # noqa: BLE001 — a defect in a hook must not end this thread
                log.error("leader.failed", error=error)
                self._stopping.wait(DEFECT_RETRY_INTERVAL)
            finally:
                self._session = None
                self._set_leading(False)

    def _wait_for_turn(self, session: DirectSession, identity: Identity) -> bool:
        if session.execute(self._registry.namespace.sql(ENTER_QUEUE), {"id": identity.id}).rowcount != 1:
            return False
        if session.execute(self._registry.namespace.sql(WARM_UP)).fetchone() == (True,):
            self._allowed = True
        elif self._allowed:
            self._allowed = False
            log.error("leader.not_allowed", missing=f"UPDATE on {self._registry.namespace.schema}.leader_turn")
        session.execute("BEGIN")
        session.patience = None
        if self._leaving:
            return False
        session.execute(self._registry.namespace.sql(WAIT_FOR_TURN))
        session.patience = PATIENCE
        session.execute("SAVEPOINT term")
        return True

    def _lead(self, session: DirectSession, identity: Identity) -> None:
        self.terms += 1
        self._free_since.clear()
        self._to_clean_up.clear()
        try:
            # Before the term begins: if this instance was frozen in the queue, its session has ended and this fails.
            self._check(session)
            self._set_leading(True)
            self._record_term(identity)
            while not self._leaving and self._link.identity == identity:
                self._check(session)
                if self._to_clean_up:
                    self._with_writer(self._clean_up)
                if clock() - self._pruned_at > PRUNE_INTERVAL:
                    self._pruned_at = clock()
                    self._with_writer(self._registry.prune)
                self._stopping.wait(0 if self._to_clean_up else self._next_check_in())
        finally:
            # Before the queue's session ends and PostgreSQL grants the lock to the next instance.
            self._set_leading(False)
            self._close_writer()

    def _record_term(self, identity: Identity) -> None:
        """Record the term for operators. Leadership does not depend on it."""
        try:
            self._with_writer(partial(self._registry.record_term, identity))
        except psycopg.Error as error:
            log.debug("leader.term_unwritten", reason=redact(" ".join(str(error).split())))

    def _check(self, session: Session) -> None:
        """Find the live rows whose presence lock is free, and declare those gone whose grace is over."""
        self.checks += 1
        now = clock()
        unlinked = self._registry.unlinked_in_term(session)
        self._trusted_until = now + PATIENCE
        self._free_since = {identifier: self._free_since.get(identifier, now) for identifier in unlinked}
        due = [i for i, since in self._free_since.items() if now - since >= self._grace(unlinked[i], now)]
        for identifier in due:
            self._with_writer(partial(self._declare, identifier, self._free_since[identifier]))

    def _grace(self, same_server: bool, now: float) -> float:
        relinked_at = self._link.relinked_at
        all_relinking = not same_server or (relinked_at is not None and now - relinked_at < RELINK_GRACE)
        return RELINK_GRACE if all_relinking else GRACE

    def _next_check_in(self) -> float:
        """Return the usual interval, or less if a grace ends before that."""
        now = clock()
        ends = [since + GRACE - now for since in self._free_since.values()]
        return max(0.01, min([CHECK_INTERVAL, *(end for end in ends if end > 0)]))

    def _declare(self, identifier: int, free_since: float, session: Session) -> None:
        name = self._registry.declare_gone(session, identifier, "its session ended")
        if name is not None:
            TAKEOVER.observe(clock() - free_since)
            log.warning("instance.gone", id=identifier, name=name, reason="its session ended")
            self._to_clean_up.append(identifier)

    def _clean_up(self, session: Session) -> None:
        """Process one batch of the rows that a gone instance left."""
        if not self._registry.clean_up(session, self._to_clean_up[0]):
            self._to_clean_up.popleft()

    def _with_writer(self, work: Callable[[Session], object]) -> None:
        """Call `work` with the second session, on which it may commit. Skip it if there is no such session."""
        if self._writer is None or self._writer.closed:
            try:
                self._writer = self._open_writer()
            except (psycopg.Error, OSError) as error:
                # Do not end the term: the server may not have a connection for a new queue session either.
                log.debug("leader.cannot_write", reason=redact(" ".join(str(error).split())))
                return
        try:
            work(self._writer)
        except psycopg.Error:
            self._close_writer()
            raise

    def _open_writer(self) -> DirectSession:
        writer = open_session(self._address, application=self._registry.namespace.application("leader"))
        # It may be idle for a whole term. Inside a transaction the lease still applies.
        writer.execute("SET idle_session_timeout = 0")
        return writer

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _set_leading(self, leading: bool) -> None:
        if leading != self._leading:
            self._leading = leading
            if leading:
                log.info("leader.elected")
                self._on_elected()
            else:
                log.info("leader.ended", reason="stepped down" if self._leaving else "session lost")
