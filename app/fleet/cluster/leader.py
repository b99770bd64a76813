"""Leadership: one instance does the cluster's housekeeping, and a killed one is replaced at once.

Every instance keeps one session in a queue for the lock on the view `leader_turn`. Whoever holds it leads; PostgreSQL
hands it on within milliseconds of the holder's session ending, whether by death, by drain, or because the server ended
a frozen one's lease. Nobody polls, and a follower's session costs no statement at all.

Why a table lock and not `pg_advisory_lock`: a session blocked in a SELECT holds a snapshot for as long as it waits,
which is for ever here, and nothing in the whole database could be vacuumed past it nor any index be built
CONCURRENTLY. `LOCK TABLE` is a utility statement and takes none, provided the catalog cache knows the view already;
`WARM_UP` sees to that, and a test holds it. The price: the leader's session shows as "idle in transaction" for its
whole term. It has no snapshot and no transaction id, so it holds up nothing (docs/decisions/0003).

What the leader does, several times a second and in one statement for all: it looks for living rows whose presence lock
is free. The look is also what keeps its own lease. One that stays free is declared gone:

    the lock was taken                              declared after
    on this very server                             GRACE: a terminated backend is linked again before that
    on another one (restart, failover), or our      RELINK_GRACE: every lock was free at once, and the others
      own link was broken as well a moment ago      need time to take theirs again

Leadership is never what makes something safe. Two leaders, were there ever two, would do the same work twice, and each
verdict is guarded by the presence lock of the one it is about (`registry.py`).

What the leader writes, it writes on a second session, because the queue's session is inside a transaction that never
commits. It keeps that session for its whole term, so that it can declare an instance gone when the server has no
connection to spare. What a death leaves over (`Register.clean_up`) is done a batch at a time between two looks.

`leading` is false before the server may let the next leader in: from the call of `step_down` on, and `PATIENCE` after
the last look that was answered was sent.

What it does not promise: that an instance leads. While the database is away, none does.
"""

import threading
from collections import deque
from collections.abc import Callable
from functools import partial

import psycopg

from app.fleet.cluster.link import Link, clock
from app.fleet.cluster.registry import GRACE, RELINK_GRACE, Identity, Register, Session
from app.fleet.db.direct import LEASE, PATIENCE, DirectSession, open_session
from app.fleet.db.namespace import Statement
from app.fleet.telemetry.logs import events
from app.fleet.telemetry.redaction import redact

LOOK = 0.135
PRUNE_EVERY = 60.0
RETRY = 0.1
RETRY_AFTER_DEFECT = 1.0

log = events(__name__)

ENTER_QUEUE = Statement(
    "UPDATE {schema}.instances SET turn_pid = pg_backend_pid() WHERE id = %(id)s AND state <> 'gone'"
)
WARM_UP = Statement("SELECT has_table_privilege('{schema}.leader_turn'::regclass, 'UPDATE')")
WAIT_FOR_TURN = Statement("LOCK TABLE {schema}.leader_turn IN EXCLUSIVE MODE")


class Leader:
    """This instance's place in the queue, and what it does when its turn comes. Runs in a thread of its own."""

    def __init__(
        self, address: str, register: Register, link: Link, on_elected: Callable[[], None] = lambda: None
    ) -> None:
        """`on_elected` is called in the leader's thread, at the beginning of each term."""
        self.terms = 0
        self.looks = 0
        self._address = address
        self._register = register
        self._link = link
        self._on_elected = on_elected
        self._leading = False
        self._trusted_until = 0.0
        self._may_lead = True
        self._stopping = threading.Event()
        self._session: DirectSession | None = None
        self._writer: DirectSession | None = None
        self._free_since: dict[int, float] = {}
        # Declared gone in this term, and not cleaned up after yet.
        self._unfinished: deque[int] = deque()
        self._pruned_at = clock()
        self._thread = threading.Thread(target=self._run, name="leader", daemon=True)

    @property
    def leading(self) -> bool:
        """Whether this instance leads, by its own clock: false before another one may."""
        return self._leading and not self._stopping.is_set() and clock() < self._trusted_until

    def start(self) -> None:
        self._thread.start()

    def step_down(self) -> None:
        """Leave the queue, from any thread; the next in it leads within milliseconds."""
        self._stopping.set()
        if session := self._session:
            session.hang_up()

    def join(self, timeout: float) -> None:
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            identity = self._link.identity
            if identity is None or not self._link.holds():
                self._stopping.wait(RETRY)
                continue
            try:
                application = self._application(f"turn/{identity.name}")
                with open_session(self._address, application=application, lease=LEASE) as session:
                    self._session = session
                    if self._wait_for_turn(session, identity):
                        self._lead(session, identity)
            except (psycopg.Error, OSError) as error:
                if not self._stopping.is_set():
                    log.debug("leader.session_lost", reason=redact(" ".join(str(error).split())))
                    self._stopping.wait(RETRY)
            except Exception as error:  # noqa: BLE001 — whatever a room above does in a death, somebody must lead
                log.error("leader.failed", error=error)
                self._stopping.wait(RETRY_AFTER_DEFECT)
            finally:
                self._session = None
                self._change(False)

    def _wait_for_turn(self, session: DirectSession, identity: Identity) -> bool:
        if session.execute(self._register.namespace.sql(ENTER_QUEUE), {"id": identity.id}).rowcount != 1:
            return False
        if session.execute(self._register.namespace.sql(WARM_UP)).fetchone() == (True,):
            self._may_lead = True
        elif self._may_lead:
            self._may_lead = False
            log.error("leader.not_allowed", missing=f"UPDATE on {self._register.namespace.schema}.leader_turn")
        session.execute("BEGIN")
        session.patience = None
        if self._stopping.is_set():
            return False
        session.execute(self._register.namespace.sql(WAIT_FOR_TURN))
        session.patience = PATIENCE
        return True

    def _lead(self, session: DirectSession, identity: Identity) -> None:
        self.terms += 1
        self._free_since.clear()
        self._unfinished.clear()
        try:
            # Before the term begins: an instance that was frozen while it waited finds out here that it lost its turn.
            self._look(session)
            self._change(True)
            self._write_down_term(identity)
            while not self._stopping.is_set() and self._link.identity == identity:
                self._look(session)
                self._clean_up()
                if clock() - self._pruned_at > PRUNE_EVERY:
                    self._pruned_at = clock()
                    self._write(self._register.prune)
                self._stopping.wait(0 if self._unfinished else self._until_next_look())
        finally:
            # Before the queue's session ends, which lets the next one in.
            self._change(False)
            self._close_writer()

    def _write_down_term(self, identity: Identity) -> None:
        """For people, who want to know who led when; leading does not depend on it."""
        try:
            self._write(partial(self._register.begin_term, identity))
        except psycopg.Error as error:
            log.debug("leader.term_unwritten", reason=redact(" ".join(str(error).split())))

    def _look(self, session: Session) -> None:
        """See whose presence lock is free, and declare those gone that had their time."""
        self.looks += 1
        now = clock()
        silent = self._register.silent(session)
        self._trusted_until = now + PATIENCE
        self._free_since = {identifier: self._free_since.get(identifier, now) for identifier in silent}
        due = [i for i, since in self._free_since.items() if now - since >= self._grace(silent[i], now)]
        for identifier in due:
            self._write(partial(self._declare, identifier))

    def _grace(self, same_server: bool, now: float) -> float:
        relinked_at = self._link.relinked_at
        shaken = not same_server or (relinked_at is not None and now - relinked_at < RELINK_GRACE)
        return RELINK_GRACE if shaken else GRACE

    def _until_next_look(self) -> float:
        """The usual time, or less if someone's grace ends before that."""
        now = clock()
        ends = [since + GRACE - now for since in self._free_since.values()]
        return max(0.01, min([LOOK, *(end for end in ends if end > 0)]))

    def _declare(self, identifier: int, session: Session) -> None:
        name = self._register.declare_gone(session, identifier, "its session ended")
        if name is not None:
            log.warning("instance.gone", id=identifier, name=name, reason="its session ended")
            self._unfinished.append(identifier)

    def _clean_up(self) -> None:
        """Do one batch of what a death left over. If this term ends first, periodic checks find the rest."""
        if self._unfinished:
            self._write(partial(self._clean_up_after, self._unfinished[0]))

    def _clean_up_after(self, identifier: int, session: Session) -> None:
        if not self._register.clean_up(session, identifier):
            self._unfinished.popleft()

    def _write(self, work: Callable[[Session], object]) -> None:
        """Do something that commits, on a second session. Without one, leave it to a later call."""
        if self._writer is None or self._writer.closed:
            try:
                self._writer = self._open_writer()
            except (psycopg.Error, OSError) as error:
                # No reason to end the term: the place in the queue is a session that could not be had again either.
                log.debug("leader.cannot_write", reason=redact(" ".join(str(error).split())))
                return
        try:
            work(self._writer)
        except psycopg.Error:
            self._close_writer()
            raise

    def _open_writer(self) -> DirectSession:
        writer = open_session(self._address, application=self._application("leader"))
        # It may be idle for a whole term; within a transaction, the lease holds.
        writer.execute("SET idle_session_timeout = 0")
        return writer

    def _close_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def _change(self, leading: bool) -> None:
        if leading != self._leading:
            self._leading = leading
            if leading:
                log.info("leader.elected")
                self._on_elected()
            else:
                log.info("leader.ended", reason="stepped down" if self._stopping.is_set() else "session lost")

    def _application(self, role: str) -> str:
        return f"flotilla/{self._register.namespace.name}/{role}"
