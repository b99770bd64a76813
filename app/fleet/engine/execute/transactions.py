"""The writes of an attempt in a transaction of its action: the end of its run (`run.commit`), the guard (`run.guard`).

Both require the attempt's token and the state `running`, and lock the run's row until the transaction ends. If no row
matches, the run was taken over: the attempt gets `Fenced`, and the transaction is rolled back with its effects. Why
that is enough: `runs/__init__.py`.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.db.pool.pool import Database
from app.fleet.db.pool.statements import fetch
from app.fleet.engine.execute.attempt import Attempt
from app.fleet.engine.execute.batches import fenced
from app.fleet.runs.attempt_writes import GUARD
from app.fleet.runs.end import COMPLETE
from app.fleet.stream.relay import CHANGED, Relay

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
        async with self._database.session() as session:
            yield session
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
