"""Claims of this instance: which queues a claim takes runs from, how many from each, and what it learns about them.

`runs/claim.py` has the statements and their protocol, `backlog.py` the queues.

The rules are in `dispatch/__init__.py`. The queues of one priority have equal shares of a claim, so a flood of runs of
one action does not starve the others. A lower priority gets what the queues of the higher ones leave. An action with
limits has no other place in the order than one without.

    kind of queue                     statement                                          in one statement
    without limits, not ordered       CLAIM                                              one or more priorities
    ordered                           CLAIM_ORDERED (`ordered.py`)                       one action
    of an action with limits          under a lock of the action's row: ALLOWED, then    one priority
                                      one of the two above, then USE_RATE
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from datetime import datetime
from itertools import groupby
from typing import Any

import psycopg

from app.fleet.cluster.registry import Identity
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.db.pool.statements import SHORT_IDLE, array
from app.fleet.db.server_clock import ServerClock
from app.fleet.engine.actions.action import MAX_PAYLOAD, Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.actions.run import MAX_CHECKPOINT
from app.fleet.engine.dispatch import ordered
from app.fleet.engine.dispatch.backlog import LATEST, Backlog, DueQueue, Queue, QueueKey, Request, shares
from app.fleet.runs.claim import (
    ACTION,
    ALLOWED,
    CLAIM,
    CLAIM_FEW,
    FOUND,
    LOCK_LIMITED,
    MAX_WEIGHT,
    NEXT_DUE,
    PRIORITY,
    RUN_AT,
    USE_RATE,
    Row,
)

# So few runs cannot be too heavy for one claim.
FEW = MAX_WEIGHT // (MAX_PAYLOAD + MAX_CHECKPOINT)
# When to try again: another transaction has locked the action's row; a limit is reached, and its end is unknown.
LOCKED_RETRY = 0.01
LIMIT_RETRY = 0.5


class Claimant:
    """Claims for one instance, through the connection that it is given."""

    def __init__(self, namespace: Namespace, catalogue: Catalogue, backlog: Backlog, clock: ServerClock) -> None:
        # The actions with limits in the table. A newer release may have declared a limit that our code does not have;
        # until the reconciler has read it, other instances claim that action.
        self.limited: set[int] = set()
        self._backlog = backlog
        self._clock = clock
        self._namespace = namespace
        self._sql = namespace.sql
        self._catalogue = catalogue
        # Whether ordered runs are claimed before the other runs of their priority: they take turns.
        self._ordered_first = False
        # The queues of the present claim in which no more runs are due now, and some are due later.
        self._later: list[QueueKey] = []

    async def claim(
        self, connection: Connection, me: Identity, due: Sequence[DueQueue], room: int, now: float
    ) -> list[Row]:
        """Claim up to `room` runs from these queues."""
        rows: list[Row] = []
        self._later = []
        try:
            groups = self._groups(due)
            for number, group in enumerate(groups, 1):
                is_last = number == len(groups)
                if len(rows) >= room:
                    pass
                elif self._is_mixed(group):
                    await self._claim_mixed(connection, me, group, room, now, rows, is_last=is_last)
                else:
                    left = room - len(rows)
                    requests = shares(group, left, is_last=is_last)
                    rows += await self._claim(connection, me, requests, left, now, counted=False)
            if self._later:
                await self._read_next_due(connection, self._later, now)
        except psycopg.Error:
            # The runs that were claimed before the error are ours, and must be executed. The reconciler finds the rest.
            if not rows:
                raise
        return rows

    async def prepare(self, connection: Connection, me: Identity) -> None:
        """Have PostgreSQL plan the claim before there is anything to claim."""
        for room in (FEW, FEW + 1):
            await self._claim(connection, me, [], room, 0.0, counted=False)

    def has_limits(self, action_id: int) -> bool:
        return action_id in self.limited or self._action(action_id).limited

    # -- in which order -----------------------------------------------------------------------------------------------

    def _groups(self, due: Sequence[DueQueue]) -> list[Sequence[DueQueue]]:
        """Split queues, highest priority first, into as few groups as keep that order.

        One statement claims from queues of any priorities, if they are neither limited nor ordered. A priority that has
        a limited or ordered queue is a separate group.
        """
        mixed = {queue.priority for key, queue in due if self._is_special(key, queue)}
        if not mixed:
            return [due]
        groups: list[Sequence[DueQueue]] = []
        for _, group in groupby(due, key=lambda each: each[1].priority if each[1].priority in mixed else None):
            groups.append([*group])
        return groups

    async def _claim_mixed(
        self,
        connection: Connection,
        me: Identity,
        group: Sequence[DueQueue],
        room: int,
        now: float,
        rows: list[Row],
        *,
        is_last: bool,
    ) -> None:
        """Claim from queues of one priority, which are of several kinds, each kind by its own statement.

        Ordered queues and the others take turns at being first, and then have all the room. Within each, every queue
        has the same share. What some queues leave of their share goes to others of this priority, and then to lower
        priorities.
        """
        parts = self._in_turn(group)
        for part in parts:
            kinds = self._kinds(part)
            share = -(-(room - len(rows)) // len(part))
            for limit in (share,) if is_last and part is parts[-1] else (share, room):
                for number, (limited, queues) in enumerate(kinds):
                    left = room - len(rows)
                    if left <= 0 or not queues:
                        continue
                    requests = [Request(key, queue, min(limit, left)) for key, queue in queues]
                    claim = self._claim_limited if limited else self._claim
                    claimed = await claim(connection, me, requests, left, now, counted=limited)
                    rows += claimed
                    many = Counter(row[ACTION] for row in claimed)
                    kinds[number] = (limited, [each for each in queues if many[each[0].action_id] >= share])

    def _in_turn(self, group: Sequence[DueQueue]) -> list[Sequence[DueQueue]]:
        """Split ordered queues from the others, which other statements claim."""
        parts: list[Sequence[DueQueue]] = [
            [each for each in group if (each[1].cursor is not None) is is_ordered] for is_ordered in (True, False)
        ]
        if all(parts):
            self._ordered_first = not self._ordered_first
        return [part for part in (parts if self._ordered_first else parts[::-1]) if part]

    def _kinds(self, part: Sequence[DueQueue]) -> list[tuple[bool, Sequence[DueQueue]]]:
        """Split limited queues from the others; those in which a run waits longest come first."""
        kinds: dict[bool, list[DueQueue]] = {}
        for each in part:
            kinds.setdefault(self.has_limits(each[0].action_id), []).append(each)
        return sorted(kinds.items(), key=lambda kind: min(queue.floor for _, queue in kind[1]))

    def _is_mixed(self, group: Sequence[DueQueue]) -> bool:
        return any(self._is_special(key, queue) for key, queue in group)

    def _is_special(self, key: QueueKey, queue: Queue) -> bool:
        return queue.cursor is not None or self.has_limits(key.action_id)

    # -- the statements -----------------------------------------------------------------------------------------------

    async def _claim(
        self, connection: Connection, me: Identity, requests: Sequence[Request], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """Claim from queues; `counted` says that the limits of their actions were read, under their lock."""
        if requests and requests[0].queue.cursor is not None:
            return await self._claim_ordered(connection, me, requests, room, now, counted=counted)
        claimed_at = self._clock.instant(now)
        values = {
            "me": me.id,
            "name": me.name,
            "actions": array(each.key.action_id for each in requests),
            "priorities": array(each.key.priority for each in requests),
            "floors": array(each.queue.floor for each in requests),
            "mosts": array(each.limit for each in requests),
            "passed": array(each.passed for each in requests),
            "timeouts": array(self._action(each.key.action_id).timeout for each in requests),
            "room": room,
            "counted": counted,
        }
        self._backlog.begin_claim()
        try:
            async with connection.cursor(binary=True) as cursor:
                await cursor.execute(self._sql(CLAIM_FEW if room <= FEW else CLAIM), values)
                rows = await cursor.fetchall()
        finally:
            added = self._backlog.end_claim()
        cut_short = len(rows) >= room or (len(rows) > 0 and (rows[0][FOUND] or 0) > len(rows))
        self._learn(requests, rows, cut_short, claimed_at, added)
        return rows

    def _learn(
        self,
        requests: Sequence[Request],
        rows: Sequence[Row],
        cut_short: bool,
        claimed_at: datetime,
        added: Mapping[QueueKey, datetime],
    ) -> None:
        """Learn from the claimed rows where the next claim of each queue begins."""
        run_ats: dict[QueueKey, list[datetime]] = {}
        for row in rows:
            run_ats.setdefault(QueueKey(row[ACTION], row[PRIORITY]), []).append(row[RUN_AT])
        for key, (queue, limit) in {each.key: (each.queue, each.limit) for each in requests}.items():
            found = run_ats.get(key, [])
            if not cut_short and len(found) < limit:
                self._backlog.exhausted(key, claimed_at, added.get(key))
                if queue.later:
                    self._later.append(key)
            elif found:
                self._backlog.found_all_asked_for(key, min(max(found), added.get(key, LATEST)))

    async def _read_next_due(self, connection: Connection, keys: Sequence[QueueKey], now: float) -> None:
        values = {
            "actions": [key.action_id for key in keys],
            "priorities": [key.priority for key in keys],
            "claimed_at": self._clock.instant(now),
        }
        rows = await (await connection.execute(self._sql(NEXT_DUE), values)).fetchall()
        found = {QueueKey(row[0], row[1]): row[2] for row in rows}
        for key in keys:
            self._backlog.next_is(key, found.get(key), now)

    async def _claim_ordered(
        self, connection: Connection, me: Identity, requests: Sequence[Request], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """Claim ordered runs, of one action after another."""
        rows: list[Row] = []
        for request in requests:
            limit = min(request.limit, room - len(rows))
            if limit <= 0:
                break
            try:
                rows += await self._claim_heads(connection, me, request, limit, now, counted=counted)
            except psycopg.Error:
                # As in `claim`. But what was claimed in a transaction is not ours before its commit.
                if counted or not rows:
                    raise
                break
        return rows

    async def _claim_heads(
        self, connection: Connection, me: Identity, request: Request, limit: int, now: float, *, counted: bool
    ) -> list[Row]:
        key, queue, cursor = request.key, request.queue, request.queue.cursor
        assert cursor is not None
        claimed_at = self._clock.instant(now)
        scans = queue.due is not None and queue.due <= now
        self._backlog.begin_claim()
        try:
            # A savepoint within the transaction of a limit; otherwise the statement is its own transaction.
            async with connection.transaction() if counted else nullcontext():
                claimed = await ordered.claim_heads(
                    connection,
                    self._namespace,
                    me,
                    cursor,
                    action=key.action_id,
                    timeout=self._action(key.action_id).timeout,
                    max_keys=ordered.MAX_KEYS if scans else 0,
                    limit=limit,
                    counted=counted,
                )
        except psycopg.errors.UniqueViolation:
            self._backlog.end_claim()
            self._backlog.wait(key, now + ordered.RETRY)
            return []
        except BaseException:
            self._backlog.end_claim()
            raise
        added = self._backlog.end_claim().get(key)
        if claimed is None:
            self._backlog.exhausted(key, claimed_at, added)
            return []
        if scans and claimed.complete:
            self._backlog.exhausted(key, claimed_at, added)
        if scans and (claimed.complete or added is not None):
            # A run that was added meanwhile may have a key that this round has passed.
            cursor.begin_round()
        if claimed.later is not None and (claimed.complete or not scans):
            self._backlog.next_is(key, claimed.later, now)
        if claimed.pause > 0:
            self._backlog.pause_scan(queue, asyncio.get_running_loop().time() + claimed.pause)
        return claimed.rows

    async def _claim_limited(
        self, connection: Connection, me: Identity, requests: Sequence[Request], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """Claim runs of actions with limits. All instances share the limits, so claims of one action take turns."""
        by_action = {each.key.action_id: each for each in requests}
        rows: list[Row] = []
        async with connection.transaction():
            await connection.execute(SHORT_IDLE)
            locked = await (await connection.execute(self._sql(LOCK_LIMITED), {"actions": list(by_action)})).fetchall()
            answer = await connection.execute(self._sql(ALLOWED), {"actions": [row[0] for row in locked]})
            allowed = {action_id: (many, wait) for action_id, many, wait in await answer.fetchall()}
            open_ = [action_id for action_id in by_action if allowed.get(action_id, (0, None))[0] > 0]
            within = [
                by_action[action_id]._replace(limit=min(by_action[action_id].limit, allowed[action_id][0]))
                for action_id in open_
            ]
            if within:
                rows = await self._claim(connection, me, within, room, now, counted=counted)
                started = [sum(row[ACTION] == action_id for row in rows) for action_id in open_]
                await connection.execute(self._sql(USE_RATE), {"actions": open_, "started": started})
        for action_id, request in by_action.items():
            many, wait = allowed.get(action_id, (0, LOCKED_RETRY))
            if many <= 0:
                # If the rate makes no claim wait, the concurrency does.
                retry = LIMIT_RETRY if wait is None or wait <= 0 else min(max(wait, 0.001), LIMIT_RETRY)
                self._backlog.wait(request.key, now + retry)
        return rows

    def _action(self, action_id: int) -> Action[Any]:
        action = self._catalogue.of_id(action_id)
        assert action is not None, "the backlog has only queues of our own actions"
        return action
