"""The relay: tells the instances that follow runs that some of these have something new. Ids, and nothing else.

A notification for each event, inside the transaction that writes it, would make all commits of the database wait for
each other. So they go out beside, after the fact: the first at once, those of the next `SPACING` together, as
`said:17,18` of runs that said something, and `changed:17,18` of those whose state is another; or `said:*` if there are
too many to name.

They only go out while somebody follows a run, or the feed. Who begins to, says `following:`, and again every `STILL`; a
relay that has not heard it for `INTEREST` keeps quiet. An idle cluster that nobody watches notifies nobody.

What it does not promise: anything. A notification that is lost, or was never sent, makes a stream slower by a poll
(`hub.py`).
"""

import asyncio
import time
from collections.abc import Collection, Iterable

import psycopg

from app.fleet.db.pool import Database
from app.fleet.errors import DatabaseError
from app.fleet.service import Service, let_go
from app.fleet.telemetry.logs import events

SPACING = 0.02
STILL = 5.0
INTEREST = 15.0
# A notification may have 8,000 bytes, and an id 19 digits.
NAMED = 390
SAID, CHANGED, FOLLOWING = "said", "changed", "following"

log = events(__name__)

NOTIFY = "SELECT pg_notify('{channel}', what) FROM unnest(%(what)s::text[]) AS what"


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
        """Somebody follows, somewhere."""
        return time.monotonic() < self._wanted_until

    def tell(self, what: str, runs: Iterable[int]) -> None:
        """These runs `SAID` something, or have `CHANGED`."""
        if self.wanted:
            self._runs[what].update(runs)
            self._work.set()

    def tell_of_followers(self) -> None:
        """Somebody follows, here."""
        self._following = True
        self._work.set()

    def heard_of_followers(self) -> None:
        """Somebody follows, here or elsewhere."""
        self._wanted_until = time.monotonic() + INTEREST

    async def _start(self) -> None:
        self._task = asyncio.create_task(self._send_for_ever(), name="relay")

    async def _stop(self) -> None:
        await let_go(self._task)

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
