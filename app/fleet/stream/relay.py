"""The relay: notifies the instances with followers which runs have new events. It sends ids, and nothing else.

PostgreSQL commits transactions that notify one after another, in the whole server. So the statement that writes an
event does not notify. The relay notifies in its own transaction, after the commit: the first event at once, and all
events of the next `SPACING` together, as `emitted:17,18` for runs that emitted events and `changed:17,18` for runs
whose state changed. If there are more than `MAX_IDS` runs, it sends `emitted:*`.

The relay notifies only while a client of any instance follows a run or the feed. An instance sends `following:` when a
client begins to follow, and again every `FOLLOWING_INTERVAL`. A relay that has not received it for `FOLLOWING_TTL`
sends nothing. So an idle cluster that no client follows sends no notifications.

Not guaranteed: delivery. A notification that is lost, or was not sent, delays a stream until the next poll (`hub.py`).
"""

import asyncio
import time
from collections.abc import Collection, Iterable

from app.fleet.background import LoopErrors, LoopService
from app.fleet.db.namespace import Statement
from app.fleet.db.pool.pool import Database
from app.fleet.telemetry.logs import event_log

SPACING = 0.02
FOLLOWING_INTERVAL = 5.0
FOLLOWING_TTL = 15.0
# A notification may have 8,000 bytes, and an id 19 digits.
MAX_IDS = 390
EMITTED, CHANGED, FOLLOWING = "emitted", "changed", "following"

log = event_log(__name__)

NOTIFY = Statement("SELECT pg_notify('{channel}', payload) FROM unnest(%(payloads)s::text[]) AS payload")


class Relay(LoopService):
    name = "relay"

    def __init__(self, database: Database) -> None:
        super().__init__()
        self.sent = 0
        self._database = database
        self._followed_until = 0.0
        self._runs: dict[str, set[int]] = {EMITTED: set(), CHANGED: set()}
        self._following = False
        self._work = asyncio.Event()
        self._errors = LoopErrors(log, failed="relay.failed", defect="engine.defect", service="relay", defect_pause=0.0)

    @property
    def has_followers(self) -> bool:
        """Whether a client follows a run or the feed, at any instance."""
        return time.monotonic() < self._followed_until

    def notify(self, kind: str, runs: Iterable[int]) -> None:
        """Notify that these runs have emitted events (`EMITTED`) or changed their state (`CHANGED`)."""
        if self.has_followers:
            self._runs[kind].update(runs)
            self._work.set()

    def notify_following(self) -> None:
        """Notify that a client follows a run or the feed at this instance."""
        self._following = True
        self._work.set()

    def on_following(self) -> None:
        """Handle `following:`: a client follows a run or the feed, at this instance or another."""
        self._followed_until = time.monotonic() + FOLLOWING_TTL

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            self._work.clear()
            payloads = [f"{FOLLOWING}:"] if self._following else []
            payloads += [f"{kind}:{joined(runs)}" for kind, runs in self._runs.items() if runs]
            self._runs = {EMITTED: set(), CHANGED: set()}
            self._following = False
            async with self._errors.logged():
                async with self._database.autocommit() as connection:
                    await connection.execute(self._database.namespace.sql(NOTIFY), {"payloads": payloads})
                self.sent += len(payloads)
            await asyncio.sleep(SPACING)


def joined(runs: Collection[int]) -> str:
    return "*" if len(runs) > MAX_IDS else ",".join(map(str, runs))
