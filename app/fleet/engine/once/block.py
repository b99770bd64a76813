"""A block of `once`: it takes its keys at the beginning and ends with all of them, or none, `seen`.

Entering a block takes the free keys in one statement (`TAKE`) and commits. They are `pending` then, and their owner is
the attempt that runs this code (its run and token) or, outside of runs, this instance. No transaction is open while the
body runs, unless it uses `fresh.session`. A block that succeeds marks its keys `seen` (`MARK`) in the transaction of
that session, or in one of its own. A block that fails releases them (`RELEASE`).

    event                                      what happens to the keys
    the body raises, or is cancelled           the session is rolled back, and the keys are free at once
    the process dies before the commit         they stay `pending`; the next block that asks for one sees that the owner
                                               has ended, and takes it
    the process dies after the commit          `seen`
    the owner was overtaken, and continues     the rows have another token: `Fenced`, and the session is rolled back
    its run was taken over, the keys were not  the same: `MARK` checks and locks the run's row
    the response to `TAKE` is lost             the token was drawn before, so the block can release what it took
    they cannot be released at once            a task tries again until it succeeds, or until the owner has ended
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import psycopg
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.cluster.member import Member
from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import Place, fetch
from app.fleet.duration import Duration
from app.fleet.engine.execute.attempt import Attempt, current_attempt
from app.fleet.engine.once.statements import DRAW_TOKEN, MARK, RELEASE, TAKE
from app.fleet.errors import DatabaseError, EngineError, Fenced
from app.fleet.validation import check_duration

State = Literal["new", "pending", "seen"]

# UTF-8 has at most four bytes for a character, and an index entry may have 2,704 bytes.
MAX_SCOPE_LENGTH = 100
MAX_KEY_LENGTH = 500
MAX_KEYS = 1000
MIN_KEEP = 1.0
# How long a block that failed waits until its keys are released. The release continues in the background.
RELEASE_TIMEOUT = 1.0
RETRY_INTERVAL = 0.5


class Owner(NamedTuple):
    """The owner of keys: an attempt or, outside of runs, an instance."""

    instance: int
    attempt: Attempt | None

    def __str__(self) -> str:
        if self.attempt is None:
            return f"instance {self.instance}"
        return f"attempt {self.attempt.number} at run {self.attempt.run_id}"

    @property
    def values(self) -> dict[str, int | None]:
        # A run that its own attempt has completed within the block cannot be taken over any more.
        attempt = None if self.attempt is None or self.attempt.committed else self.attempt
        return {
            "instance": self.instance,
            "run": None if attempt is None else attempt.run_id,
            "run_token": None if attempt is None else attempt.token,
        }


@dataclass
class Block:
    owner: Owner
    scope: str
    # The keys that the block may have: all of them until `TAKE` has responded, then only the keys that it has taken.
    keys: list[str]
    keep: float
    token: int = 0
    states: dict[str, State] = field(default_factory=dict)
    session: AsyncSession | None = None
    ended: bool = False

    def set_states(self, states: Mapping[str | None, State]) -> None:
        # The response has no row for a key that was free and that another block took at the same time.
        self.states = {key: states.get(key, "pending") for key in self.keys}
        self.keys = self.keys_in("new")

    def keys_in(self, state: State) -> list[str]:
        return [key for key, found in self.states.items() if found == state]

    @property
    def values(self) -> dict[str, Any]:
        own = {"scope": self.scope, "keys": self.keys, "token": self.token, "keep": self.keep}
        return own | self.owner.values


class Batch:
    """The keys of a block, in the given order, by their state when it began. The block has taken those in `fresh`."""

    def __init__(self, block: Block, begin: Callable[[], AsyncSession]) -> None:
        self.fresh = block.keys_in("new")
        self.pending = block.keys_in("pending")
        self.seen = block.keys_in("seen")
        self._block = block
        self._begin = begin

    @property
    def token(self) -> int:
        """Higher than the token of any earlier block that had one of these keys."""
        return self._block.token

    @property
    def session(self) -> AsyncSession:
        """The transaction in which the keys become seen. Its first use begins it; the end of the block commits it."""
        if not self.fresh:
            raise EngineError("this block has no fresh key, so it has nothing to commit: check `fresh` first")
        if self._block.ended:
            raise EngineError("the block of this session has ended: use the session inside `async with`")
        if self._block.session is None:
            self._block.session = self._begin()
        return self._block.session


class Fresh:
    """One key: true if the block has taken it."""

    def __init__(self, batch: Batch) -> None:
        self.state: State = "new" if batch.fresh else "pending" if batch.pending else "seen"
        self._batch = batch

    def __bool__(self) -> bool:
        return self.state == "new"

    @property
    def token(self) -> int:
        """Higher than the token of any earlier block that had this key."""
        return self._batch.token

    @property
    def session(self) -> AsyncSession:
        """The transaction in which the key becomes seen. Its first use begins it; the end of the block commits it."""
        return self._batch.session


class SeenStore:
    """Runs the blocks of one instance."""

    def __init__(self, database: Database, member: Member) -> None:
        self._database = database
        self._member = member
        self._sql = database.namespace.sql
        self._releases: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def block(self, scope: str, keys: Iterable[str], keep: Duration) -> AsyncIterator[Batch]:
        block = Block(
            self._owner(),
            check_text("a scope", scope, MAX_SCOPE_LENGTH),
            distinct(keys),
            check_duration("keep", keep, EngineError, minimum=MIN_KEEP),
        )
        try:
            await self._take(block)
            yield Batch(block, self._database.new_session)
            await self._mark(block)
        except BaseException:
            await self._release(block)
            raise

    def _owner(self) -> Owner:
        if (identity := self._member.identity) is None:
            raise Fenced("this instance was declared gone and is registering again: until then it cannot take a key")
        return Owner(identity.id, current_attempt.get())

    async def _take(self, block: Block) -> None:
        """Take the free keys, and read the states of the others."""
        if not block.keys:
            return
        async with self._database.autocommit() as connection:
            ((block.token,),) = await fetch(connection, self._sql(DRAW_TOKEN))
            states = dict(await fetch(connection, self._sql(TAKE), block.values))
        if None not in states:
            raise self._fenced(block)
        block.set_states(states)

    async def _mark(self, block: Block) -> None:
        """Mark the block's keys seen, in the transaction of its session if it has one."""
        block.ended = True
        if block.session is not None:
            async with block.session as session:
                # `MARK` is the last statement, so its locks are held only until the commit.
                await session.flush()
                await self._mark_in(session, block)
                await session.commit()
        elif block.keys:
            async with self._database.autocommit() as connection:
                await self._mark_in(connection, block)

    async def _mark_in(self, connection: Place, block: Block) -> None:
        ((marked,),) = await fetch(connection, self._sql(MARK), block.values)
        if marked != len(block.keys):
            raise self._fenced(block)

    async def _release(self, block: Block) -> None:
        """Roll back the block's session and release its keys."""
        block.ended = True
        try:
            if block.session is not None:
                # A second cancellation must not interrupt this: the pool could not use the connection again.
                await asyncio.shield(asyncio.create_task(block.session.close()))
        finally:
            if block.token and block.keys:
                await self._release_keys(block)

    async def _release_keys(self, block: Block) -> None:
        """Release the keys in a task: neither a cancellation nor an outage may leave them with a living owner."""
        task = asyncio.create_task(self._try_release(block), name="once-release")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)
        await asyncio.wait({task}, timeout=RELEASE_TIMEOUT)

    async def _try_release(self, block: Block) -> None:
        while self._database.running and self._is_alive(block.owner):
            try:
                async with self._database.autocommit() as connection:
                    await connection.execute(self._sql(RELEASE), block.values)
            except (psycopg.Error, DatabaseError):
                await asyncio.sleep(RETRY_INTERVAL)
            else:
                return

    def _is_alive(self, owner: Owner) -> bool:
        return self._member.identity is not None and self._member.identity.id == owner.instance

    def _fenced(self, block: Block) -> Fenced:
        """Return the error for an owner that has ended, and count it like any other late write of an attempt."""
        if block.owner.attempt is not None:
            block.owner.attempt.refuse("once")
        return Fenced(
            f"{block.owner} is out of date: its instance was declared gone, or its run was taken over or has ended. "
            f"Its keys of {block.scope!r} are free for other blocks, and the block's session is rolled back"
        )


def check_text(what: str, text: object, max_length: int) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= max_length or not text.isprintable():
        raise EngineError(f"{what} must be a text of 1 to {max_length} printable characters, and not {text!r:.80}")
    return text


def distinct(keys: Iterable[str]) -> list[str]:
    """Return the keys in the given order, each once."""
    if isinstance(keys, str):
        raise EngineError("`keys` must be a list of texts, and not one text: use once() for a single key")
    found = list(dict.fromkeys(check_text("a key", key, MAX_KEY_LENGTH) for key in keys))
    if len(found) > MAX_KEYS:
        raise EngineError(
            f"{len(found)} keys are too many for one block; the maximum is {MAX_KEYS}: use several blocks"
        )
    return found
