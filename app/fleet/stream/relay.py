"""The relay: notifies the instances that follow runs which of these have something new. It sends ids, and nothing else.

A notification for each event, inside the transaction that writes it, would make all commits of the server wait for each
other. So the relay notifies in a transaction of its own, after the commit: the first event at once, those of the next
`SPACING` together, as `said:17,18` for runs that emitted something and `changed:17,18` for runs whose state changed; or
`said:*` if there are too many runs to name.

It notifies only while a client follows a run or the feed, at any instance. An instance where a client begins to follow
sends `following:`, and again every `STILL`; a relay that has not received it for `INTEREST` sends nothing. An idle
cluster that no client watches sends no notifications.

Not guaranteed: delivery. A notification that is lost, or was never sent, delays a stream by a poll at most (`hub.py`).
"""

import asyncio
import time
from collections.abc import Collection, Iterable

import psycopg

from app.fleet.background import Service, cancel_and_wait
from app.fleet.db.namespace import Statement
from app.fleet.db.pool import Database
from app.fleet.errors import DatabaseError
from app.fleet.telemetry.logs import events

SPACING = 0.02
STILL = 5.0
INTEREST = 15.0
# A notification may have 8,000 bytes, and an id 19 digits.
NAMED = 390
SAID, CHANGED, FOLLOWING = "said", "changed", "following"

log = events(__name__)

NOTIFY = Statement("SELECT pg_notify('{channel}', what) FROM unnest(%(what)s::text[]) AS what")


class Relay(Service):
    name = "relay"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.sent = 0
        self._database = database
        self._wanted_until = 0.0
        self._runs: dict[str, set[int]] = {SAID: set(), CHANGED: set()}
        self._following = False
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether a client follows something, at any instance."""
        return time.monotonic() < self._wanted_until

    def tell(self, what: str, runs: Iterable[int]) -> None:
        """Notify that these runs emitted something (`SAID`), or changed their state (`CHANGED`)."""
        if self.wanted:
            self._runs[what].update(runs)
            self._work.set()

    def tell_of_followers(self) -> None:
        """Notify that a client follows something at this instance."""
        self._following = True
        self._work.set()

    def heard_of_followers(self) -> None:
        """Note that a client follows something, at this instance or another."""
        self._wanted_until = time.monotonic() + INTEREST

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._send_for_ever(), name="relay")

    async def _stop(self) -> None:
        await cancel_and_wait(self._task)

    async def _send_for_ever(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            what = [f"{FOLLOWING}:"] if self._following else []
            what += [f"{kind}:{named(runs)}" for kind, runs in self._runs.items() if runs]
            self._runs = {SAID: set(), CHANGED: set()}
            self._following = False
            try:
                async with self._database.autocommit() as connection:
                    await connection.execute(self._database.namespace.sql(NOTIFY), {"what": what})
                self.sent += len(what)
            except (psycopg.Error, DatabaseError) as error:
                log.debug("relay.failed", reason=" ".join(str(error).split()))
            except Exception as error:  # noqa: BLE001 — a defect of ours must not end it for good
                log.error("engine.defect", error=error, service="relay")
            await asyncio.sleep(SPACING)


def named(runs: Collection[int]) -> str:
    return "*" if len(runs) > NAMED else ",".join(map(str, runs))
