"""The writes of an attempt in a transaction of its action: the end of its run (`run.commit`), the guard (`run.guard`).

Both require the attempt's token and the state `running`, and lock the run's row until the transaction ends. If no row
matches, the run was taken over: the attempt gets `Fenced`, and the transaction is rolled back with its effects. Why
that is enough: `runs/__init__.py`. A commit inside the block of `run.commit` is refused before it takes effect; a
savepoint is not.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sqlalchemy import event
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.batches import fenced
from app.fleet.errors import EngineError
from app.fleet.runs.attempt_writes import GUARD
from app.fleet.runs.end import COMPLETE
from app.fleet.stream.relay import CHANGED, Relay
from app.fleet.telemetry import tracing

if TYPE_CHECKING:
    from app.fleet.engine.execute.writer import RunWriter


class RunTransactions:
    def __init__(self, database: Database, relay: Relay, writer: "RunWriter") -> None:
        self._database = database
        self._relay = relay
        self._writer = writer

    @asynccontextmanager
    async def commit(self, attempt: Attempt, result: Callable[[], str | None]) -> AsyncIterator[AsyncSession]:
        """Commit what the block does and the end of the run; `result` is called after the block."""
        in_block = True

        def refuse_commit(of: Session) -> None:
            # Otherwise the effects would be committed without the end of the run, and made again by the next attempt.
            if in_block and not of.in_nested_transaction():
                raise EngineError("run.commit() commits at the end of its block: do not commit its session inside")

        with tracing.spanning("commit", {"messaging.message.id": str(attempt.run_id)}):
            async with self._database.session() as session:
                event.listen(session.sync_session, "before_commit", refuse_commit)
                yield session
                in_block = False
                # Its events happened before its end.
                await self._writer.until_events_are_written(attempt)
                values = {
                    "ids": [attempt.run_id],
                    "tokens": [attempt.token],
                    "states": None,
                    "results": [result()],
                    "errors": None,
                }
                if not await fetch(session, self._database.namespace.sql(COMPLETE), values):
                    self._writer.refuse(attempt, "commit")
                    raise fenced(attempt)
        self._relay.notify(CHANGED, [attempt.run_id])

    async def guard(self, attempt: Attempt, session: AsyncSession) -> None:
        values = {"id": attempt.run_id, "token": attempt.token}
        if not await fetch(session, self._database.namespace.sql(GUARD), values):
            self._writer.refuse(attempt, "guard")
            raise fenced(attempt)
