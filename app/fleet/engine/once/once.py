"""The seen-store: a key is processed once, and it is `seen` only when its processing has succeeded.

    async with once("filings", filing.accession) as fresh:
        if fresh:
            await trigger("research-filing", filing, session=fresh.session)

A key is a row of `once_keys`. Entering a block takes it in one statement, `TAKE`, and commits: it is `pending` then,
and its owner is the attempt that runs this code (its run and token) or, outside of runs, this instance. The body may
take its time: no transaction is open, unless it uses `fresh.session`. A block that ends well makes its keys `seen` in
that transaction, or in one of its own, all of them or none (`MARK`). One that does not gives them back (`RELEASE`).

    what happens                            what becomes of the key
    the body raises, or is cancelled        rolled back, and `free` at once
    the process dies before the commit      it stays `pending`; whoever asks next finds its owner ended, and takes it
    the process dies after the commit       `seen`
    the owner is overtaken, and goes on     its token is not in the row any more: `Fenced`, and rolled back
    its run was taken over, the key not     the same: `MARK` holds the run's row, as `Run.guard` does
    the answer to `TAKE` is lost            the token was drawn before, so it is known what to give back
    it cannot be given back at once         it is tried until it can, or until the owner has ended

Of those who ask in the same moment, exactly one has it. Who inserts second waits for the first, by the primary key, and
then meets a row. A row is taken by `ON CONFLICT DO UPDATE`, which waits for it and looks at its newest version; but
whether an owner has ended is read as of the statement's beginning, when a younger owner was not there yet and looks
like none. Hence the token: it is drawn before the statement begins, and takes only from lower ones. Whoever has a lower
one was there before, so what the statement reads of it is true; and an owner that has ended does not come back, because
an attempt's token is not given again, nor an instance's id. Whoever has a higher one keeps what it has.

So a key's tokens only ever grow, also when it was forgotten in between. Lock order: run, instance, keys by their bytes;
everywhere, so that two batches wait for each other but never both ways.

What it does not promise: that a body runs once. It may be killed after what it did outside of the database, and an
owner that was taken for dead may still be at it. Nor that a `pending` key becomes `seen`: who is told so comes back.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, NamedTuple

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.member import Member
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection, Database
from app.fleet.db.statements import Place, fetch
from app.fleet.duration import Duration
from app.fleet.engine.execute.run import Run, current_run
from app.fleet.errors import DatabaseError, EngineError, Fenced, FleetError
from app.fleet.validation import check_duration

State = Literal["new", "pending", "seen"]

# Letters, of which UTF-8 makes four bytes at most: together, what an entry of an index may have (2,704).
SCOPE_MOST = 100
KEY_MOST = 500
KEYS_MOST = 1000
KEEP_LEAST = 1.0
# How long a block that failed waits until its keys are given back. They will be, without it.
PATIENCE = 1.0
RETRY = 0.5

DRAW = Statement("SELECT nextval('{schema}.once_tokens')")

# Whether the owner of the row `k` is still at it.
LIVES = """
CASE
    WHEN k.run_id IS NULL
    THEN (SELECT i.state <> 'gone' FROM {schema}.instances AS i WHERE i.id = k.instance_id)
    ELSE (SELECT r.state = 'running' FROM {schema}.runs AS r WHERE r.id = k.run_id AND r.token = k.run_token)
END IS TRUE
"""

# What the row `k` means for who asks.
MEANS = f"""
CASE
    WHEN k.state = 'seen' AND k.expires_at > statement_timestamp() THEN 'seen'
    WHEN k.state = 'pending' AND {LIVES} THEN 'pending'
    ELSE 'free'
END
"""

# One row, if we may act: this instance is not gone; and in a run, that is ours, and stays so until the commit.
OWNER = """
mine AS MATERIALIZED (
    SELECT id
    FROM {schema}.runs
    WHERE id = %(run)s::int8 AND token = %(run_token)s::int8 AND state = 'running'
    FOR KEY SHARE
), owner AS MATERIALIZED (
    SELECT id
    FROM {schema}.instances
    WHERE id = %(instance)s AND state <> 'gone' AND (%(run)s::int8 IS NULL OR EXISTS (SELECT FROM mine))
"""

# Keys that are not free are only read. LATERAL: row by row, by the primary key. The instance is held, as by a claim.
TAKE = Statement(f"""
WITH {OWNER}
    FOR KEY SHARE
), asked AS MATERIALIZED (
    SELECT w.key, coalesce(f.means, 'free') AS means
    FROM unnest(%(keys)s::text[]) AS w (key)
    LEFT JOIN LATERAL (
        SELECT {MEANS} AS means
        FROM {{schema}}.once_keys AS k
        WHERE k.scope = %(scope)s AND k.key = w.key
        LIMIT 1
    ) AS f ON true
), taken AS (
    INSERT INTO {{schema}}.once_keys AS k (scope, key, token, state, instance_id, run_id, run_token, taken_at)
    SELECT %(scope)s, a.key, %(token)s, 'pending', o.id, %(run)s, %(run_token)s, clock_timestamp()
    FROM owner AS o, asked AS a
    WHERE a.means = 'free'
    ORDER BY a.key COLLATE "C"
    ON CONFLICT (scope, key) DO UPDATE
    SET token = excluded.token, state = 'pending', instance_id = excluded.instance_id, run_id = excluded.run_id,
        run_token = excluded.run_token, taken_at = excluded.taken_at, expires_at = NULL
    WHERE k.token < excluded.token AND {MEANS} = 'free'
    RETURNING k.key
)
SELECT key, 'new' FROM taken
UNION ALL
SELECT a.key, a.means FROM owner, asked AS a WHERE a.means <> 'free'
UNION ALL
SELECT NULL, 'ours' FROM owner
""")

# Looked at under the lock. Through `ARRAY`, of which the planner expects few: so it goes by the primary key, however
# short the table is just then. Pending is what does not expire: asked in this way, it does not lead into the index of
# those that are pending, where all that have left it are met until vacuum comes.
HELD = """
SELECT k.key
FROM {schema}.once_keys AS k
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT unnest(%(keys)s::text[]))) AND k.token = %(token)s
  AND k.expires_at IS NULL
"""
LOCKED = """
ORDER BY k.key COLLATE "C"
FOR NO KEY UPDATE
"""

# All or none: without a session this is a transaction by itself.
MARK = Statement(f"""
WITH {OWNER}
), held AS MATERIALIZED (
    {HELD} AND EXISTS (SELECT FROM owner) {LOCKED}
), marked AS (
    UPDATE {{schema}}.once_keys AS k
    SET state = 'seen', expires_at = clock_timestamp() + make_interval(secs => %(keep)s)
    WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM held))
      AND (SELECT count(*) FROM held) = cardinality(%(keys)s::text[])
    RETURNING 1
)
SELECT count(*) FROM marked
""")

RELEASE = Statement(f"""
WITH held AS MATERIALIZED (
    {HELD} {LOCKED}
)
UPDATE {{schema}}.once_keys AS k
SET state = 'free', expires_at = clock_timestamp()
WHERE k.scope = %(scope)s AND k.key = ANY (ARRAY(SELECT key FROM held))
""")

# The minute is for who drew a token before: while the row is there, an older token cannot take it. A key whose owner
# died and that nobody has asked for since is nothing to remember either.
FORGET = Statement(f"""
WITH old AS MATERIALIZED (
    SELECT ctid, expires_at
    FROM {{schema}}.once_keys
    WHERE state <> 'pending' AND expires_at >= %(floor)s
      AND expires_at < statement_timestamp() - interval '1 minute'
    ORDER BY expires_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), left_behind AS MATERIALIZED (
    SELECT k.ctid
    FROM {{schema}}.once_keys AS k
    WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 day' AND NOT {LIVES}
    ORDER BY k.taken_at
    LIMIT %(batch)s
    FOR UPDATE SKIP LOCKED
), gone AS (
    DELETE FROM {{schema}}.once_keys
    WHERE ctid = ANY (ARRAY(SELECT ctid FROM old UNION ALL SELECT ctid FROM left_behind))
    RETURNING 1
)
SELECT count(*), (SELECT max(expires_at) FROM old) FROM gone
""")

PENDING_TOO_LONG = Statement(f"""
SELECT k.scope, count(*), min(k.taken_at)
FROM {{schema}}.once_keys AS k
WHERE k.state = 'pending' AND k.taken_at < statement_timestamp() - interval '1 hour' AND {LIVES}
GROUP BY k.scope
ORDER BY k.scope
""")


class Owner(NamedTuple):
    """Who takes keys: an attempt, or outside of runs an instance."""

    instance: int
    run: Run[Any] | None

    def __str__(self) -> str:
        return f"instance {self.instance}" if self.run is None else f"attempt {self.run.attempt} at run {self.run.id}"

    @property
    def values(self) -> dict[str, int | None]:
        # A run that its own attempt has completed, inside of the block, is nobody's to take over any more.
        run = None if self.run is None or self.run.committed else self.run
        return {
            "instance": self.instance,
            "run": None if run is None else run.id,
            "run_token": None if run is None else run.token,
        }


@dataclass
class Block:
    """What one `async with` has taken, and has to end."""

    owner: Owner
    scope: str
    # What there may be to give back: all it asked for, until there is an answer, and then what is its own.
    keys: list[str]
    keep: float
    token: int = 0
    states: dict[str, State] = field(default_factory=dict)
    session: AsyncSession | None = None
    ended: bool = False

    def answered(self, states: Mapping[str | None, State]) -> None:
        # One that was free, and that somebody else took in this very moment, is in no row of the answer.
        self.states = {key: states.get(key, "pending") for key in self.keys}
        self.keys = self.of("new")

    def of(self, state: State) -> list[str]:
        return [key for key, found in self.states.items() if found == state]

    @property
    def values(self) -> dict[str, Any]:
        own = {"scope": self.scope, "keys": self.keys, "token": self.token, "keep": self.keep}
        return own | self.owner.values


class Batch:
    """The keys of a block, in the order given, by what they were when it asked. Those that are `fresh` are its own."""

    def __init__(self, block: Block, begin: Callable[[], AsyncSession]) -> None:
        self.fresh = block.of("new")
        self.pending = block.of("pending")
        self.seen = block.of("seen")
        self._block = block
        self._begin = begin

    @property
    def token(self) -> int:
        """Higher than that of any block that had one of these keys before."""
        return self._block.token

    @property
    def session(self) -> AsyncSession:
        """The transaction in which the keys become seen. It begins with its first use, and is committed for you."""
        if not self.fresh:
            raise EngineError("no key here is this block's own, so there is nothing to commit: ask what is fresh first")
        if self._block.ended:
            raise EngineError("the block of this session has ended: use it inside of `async with`")
        if self._block.session is None:
            self._block.session = self._begin()
        return self._block.session


class Fresh:
    """One key: true if it is this block's own."""

    def __init__(self, batch: Batch) -> None:
        self.state: State = "new" if batch.fresh else "pending" if batch.pending else "seen"
        self._batch = batch

    def __bool__(self) -> bool:
        return self.state == "new"

    @property
    def token(self) -> int:
        """Higher than that of any block that had this key before."""
        return self._batch.token

    @property
    def session(self) -> AsyncSession:
        """The transaction in which the key becomes seen. It begins with its first use, and is committed for you."""
        return self._batch.session


class SeenStore:
    """The keys of a service, as one of its instances takes them, marks them and gives them back."""

    def __init__(self, database: Database, member: Member) -> None:
        self._database = database
        self._member = member
        self._sql = database.namespace.sql
        self._giving_back: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def block(self, scope: str, keys: Iterable[str], keep: Duration) -> AsyncIterator[Batch]:
        block = Block(
            self._owner(),
            sound("a scope", scope, SCOPE_MOST),
            distinct(keys),
            check_duration("keep", keep, EngineError, minimum=KEEP_LEAST),
        )
        try:
            await self._take(block)
            yield Batch(block, self._database.unbegun)
            await self._mark(block)
        except BaseException:
            await self._release(block)
            raise

    def _owner(self) -> Owner:
        if (me := self._member.identity) is None:
            raise Fenced("this instance was declared gone and is registering again: until then, nothing can be its own")
        return Owner(me.id, current_run.get())

    async def _take(self, block: Block) -> None:
        """Take the keys that are free, and learn what the others are."""
        if not block.keys:
            return
        async with self._database.autocommit() as connection:
            ((block.token,),) = await fetch(connection, self._sql(DRAW))
            states = dict(await fetch(connection, self._sql(TAKE), block.values))
        if None not in states:
            raise self._refused(block)
        block.answered(states)

    async def _mark(self, block: Block) -> None:
        """Make its keys seen, together with what was done in its session."""
        block.ended = True
        if block.session is not None:
            async with block.session as session:
                # The mark comes last, and holds what it locks for no longer than the commit takes.
                await session.flush()
                await self._mark_in(session, block)
                await session.commit()
        elif block.keys:
            async with self._database.autocommit() as connection:
                await self._mark_in(connection, block)

    async def _mark_in(self, place: Place, block: Block) -> None:
        ((marked,),) = await fetch(place, self._sql(MARK), block.values)
        if marked != len(block.keys):
            raise self._refused(block)

    async def _release(self, block: Block) -> None:
        """Undo what was done in its session, and give its keys back."""
        block.ended = True
        try:
            if block.session is not None:
                # A second cancellation must not cut it short: the connection would be of no use to anybody.
                await asyncio.shield(asyncio.create_task(block.session.close()))
        finally:
            if block.token and block.keys:
                await self._give_back(block)

    async def _give_back(self, block: Block) -> None:
        """Have a task do it: neither a cancellation nor an outage may leave them with an owner who has left them."""
        giving = asyncio.create_task(self._give_back_at_last(block), name="once-release")
        self._giving_back.add(giving)
        giving.add_done_callback(self._giving_back.discard)
        await asyncio.wait({giving}, timeout=PATIENCE)

    async def _give_back_at_last(self, block: Block) -> None:
        while self._database.running and self._lives(block.owner):
            try:
                async with self._database.autocommit() as connection:
                    await connection.execute(self._sql(RELEASE), block.values)
            except (psycopg.Error, DatabaseError):
                await asyncio.sleep(RETRY)
            else:
                return

    def _lives(self, owner: Owner) -> bool:
        return self._member.identity is not None and self._member.identity.id == owner.instance

    def _refused(self, block: Block) -> Fenced:
        """Count it, like whatever else an attempt writes too late."""
        if (run := block.owner.run) is not None:
            run._writer.refuse(run, "once", stop=False)  # noqa: SLF001 — an attempt has one writer
        return Fenced(
            f"{block.owner} is out of date: it was taken for dead, or its run has ended. Its keys of {block.scope!r} "
            f"are free for others, and nothing that was done in the block's session is kept"
        )


# -- for the leader, and for who looks --------------------------------------------------------------------------------


async def forget(connection: Connection, namespace: Namespace, floor: datetime, batch: int) -> tuple[int, datetime]:
    """Forget so many keys whose time is over, beginning with those of `floor`; return how many, and up to when."""
    values = {"floor": floor, "batch": batch}
    row = await (await connection.execute(namespace.sql(FORGET), values)).fetchone()
    assert row is not None
    return row[0], row[1] or floor


async def pending_too_long(connection: Connection, namespace: Namespace) -> list[tuple[str, int, datetime]]:
    """Return the scopes with keys that a living owner has had for more than an hour: how many, and since when."""
    return await (await connection.execute(namespace.sql(PENDING_TOO_LONG))).fetchall()


async def stays_pending(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> list[Anomaly]:
    """Look for keys that somebody has had for too long."""
    return [
        Anomaly(
            "once_pending",
            scope,
            since,
            f"{many} keys of {scope!r} have been pending for more than an hour, the first since "
            f"{since:%Y-%m-%d %H:%M:%S %Z}: whoever has them lives, and does not come to an end with them",
        )
        for scope, many, since in await pending_too_long(connection, namespace)
    ]


# -- what may be asked ------------------------------------------------------------------------------------------------


def sound(what: str, text: object, most: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= most or not text.isprintable():
        raise EngineError(f"{what} is a text of 1 to {most} printable letters, and not {text!r:.80}")
    return text


def distinct(keys: Iterable[str]) -> list[str]:
    if isinstance(keys, str):
        raise EngineError("keys are a list of texts, and this is one text: use once() for a single key")
    wanted = list(dict.fromkeys(sound("a key", key, KEY_MOST) for key in keys))
    if len(wanted) > KEYS_MOST:
        raise EngineError(f"{len(wanted)} keys at once, and there may be {KEYS_MOST}: take them in parts")
    return wanted


# -- for the service's code -------------------------------------------------------------------------------------------

# Whose keys `once` means: set for each request and each attempt.
current: ContextVar[SeenStore] = ContextVar("flotilla_seen_store")


@asynccontextmanager
async def once(scope: str, key: str, keep: Duration = "7d") -> AsyncIterator[Fresh]:
    """Process a key once: what this yields is true if it is this block's to do. Seen when the block ends well."""
    async with here().block(scope, [key], keep) as batch:
        yield Fresh(batch)


def once_many(scope: str, keys: Iterable[str], keep: Duration = "7d") -> AbstractAsyncContextManager[Batch]:
    """Do the same for up to a thousand keys: those in `fresh` are this block's to do, all in one transaction."""
    return here().block(scope, keys, keep)


def here() -> SeenStore:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "once() and once_many() are for the code of a running service: a route, or an async action"
        ) from None
