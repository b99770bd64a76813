"""The claim: pending runs become running, here, each by one instance, with a token nobody had before.

One statement picks, with `FOR UPDATE SKIP LOCKED`, and takes. It asks for three things that must be true in the moment
of the commit, and holds them until then:

- this instance is alive: its row is locked FOR KEY SHARE, and who declares it gone locks it FOR UPDATE. Either the
  claim commits first, and the death's transaction sees its runs; or the death does, and the claim finds nobody. A run
  that is `running` under an instance that is gone, with nobody to take it back, cannot come to be.
- the action is not paused;
- for an action with `concurrency` or `rate`: its row is locked, and what runs is counted after that, by a statement of
  its own, because a statement sees what was committed when it began. That makes both exact, and claims of one such
  action take turns.

Where to look is kept in memory (`Backlog`), by action and priority: told by notifications, by our own retries, and by
the poll, which asks the database which there are (`maintenance/reconciler.py`). Nothing depends on it but speed.

Each place has a floor: an instant before which nothing is waiting there. An index keeps the entries of runs that have
left until vacuum removes them, which a single open snapshot anywhere in the database delays for as long as it lives;
a claim that began at the index's beginning would walk through all of them. It begins at the floor instead. The floor
is the time of the statement that found no more, and comes down again when a notification speaks of an earlier run. A
run that was hidden at that moment (its transaction committed later, or another claim had it locked and then died) is
found by the poll.

When very many become due at once, instances that all looked at all places would mostly find what another has locked.
Each has a part of the places then, by the action's id, and leaves the others' for `LATER`. How many parts there are,
and which is ours, is what the reconciler last saw; where that is wrong, somebody's part waits for that long.

Runs in lines wait at a place of their own, and are claimed by a statement of their own (`ordered.py`), under the same
three conditions.

One order holds for all of them, limited or not, in lines or not: the highest priority first, and within a priority the
place where a run waits longest. Places of one priority have equal shares of a claim; a lower priority has what all
places of the higher ones have left.

The floor does not hold for an action with `concurrency`: each claim counts what runs of it, through an index that keeps
the entries of runs that have ended until vacuum removes them. Under a snapshot that is held for long, that count takes
about 6 ms for every 100,000 runs of the action that ended meanwhile. An action with a `rate` alone counts nothing.

A claim has `HEAVY` bytes of payloads and checkpoints at the most (`claim.py`); what it had to leave is claimed next.

Lock order: instance, actions by id, runs.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import psycopg

from app.fleet.cluster.registry import Identity
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool import Connection
from app.fleet.db.statements import array
from app.fleet.engine.actions.action import MAX_PAYLOAD, Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.engine.dispatch import ordered
from app.fleet.engine.dispatch.ordered import LINES, ScanCursor
from app.fleet.engine.execute.run import STATE_MOST
from app.fleet.runs.claim import (
    ACTION,
    FOUND,
    HEAVY,
    ME,
    PICKED,
    PRIORITY,
    RUN_AT,
    TOO_MANY,
    WEIGHT,
    Row,
    row,
    taken,
)


def claim(weight: str, picked: str, too_many: str) -> str:
    """Return the statement that claims from many places, in their order, and no further than there is room.

    The ORDER BY is that of the rows as they come, so that nothing is sorted and no more is locked. `passed` says how
    many a place before this one has taken of the same runs.
    """
    return f"""
WITH {ME}, places AS (
    SELECT *
    FROM unnest(%(actions)s::int[], %(priorities)s::int[], %(floors)s::timestamptz[], %(mosts)s::int[],
                %(passed)s::int[], %(timeouts)s::float8[])
         WITH ORDINALITY AS p (action_id, priority, floor, most, passed, timeout, place)
), found AS MATERIALIZED (
    SELECT r.id, r.weight
    FROM (SELECT * FROM places ORDER BY place) AS p, LATERAL (
        SELECT id, {weight} AS weight
        FROM {{schema}}.runs
        WHERE state = 'pending' AND action_id = p.action_id AND priority = p.priority
          AND run_at >= p.floor AND run_at <= statement_timestamp()
        ORDER BY run_at, id
        LIMIT coalesce((
            SELECT p.most
            FROM {{schema}}.actions AS a
            WHERE a.id = p.action_id AND a.paused_at IS NULL AND EXISTS (SELECT FROM me)
              AND (%(counted)s OR (a.concurrency IS NULL AND a.rate_interval IS NULL))
        ), 0)
        OFFSET p.passed
        FOR UPDATE SKIP LOCKED
    ) AS r
    ORDER BY p.place
    LIMIT %(room)s
), {picked}, {taken("p.timeout", "FROM places AS p", "p.action_id = r.action_id AND p.priority = r.priority")}
SELECT {row()}, {too_many} FROM claimed
"""


CLAIM = Statement(claim(WEIGHT, PICKED, TOO_MANY))
# So few that they cannot be too heavy together.
CLAIM_FEW = Statement(claim("0", "picked AS (SELECT id FROM found)", "NULL::int8"))
FEW = HEAVY // (MAX_PAYLOAD + STATE_MOST)

# Those that somebody else is claiming right now are left out; there will be another time.
LOCK_LIMITED = Statement("""
SELECT id FROM {schema}.actions WHERE id = ANY (%(actions)s) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
""")

# What is left, under the lock. `rate_used_until` moves on by one interval for each start (GCRA); it may run ahead of
# the clock by the burst, and no further. Without any limit: a newer release than ours has taken it away.
ALLOWED = Statement("""
SELECT a.id,
       coalesce(least(
           CASE WHEN a.concurrency IS NOT NULL THEN a.concurrency - (
               SELECT count(*) FROM {schema}.runs AS r WHERE r.action_id = a.id AND r.state = 'running'
           ) END,
           floor(
               a.rate_burst
               - extract(epoch FROM greatest(a.rate_used_until, statement_timestamp()) - statement_timestamp())
                 / a.rate_interval
               + 1e-6
           )
       )::int, 2147483647) AS allowed,
       extract(epoch FROM a.rate_used_until - statement_timestamp())::float8 - (a.rate_burst - 1) * a.rate_interval
FROM {schema}.actions AS a
WHERE a.id = ANY (%(actions)s)
""")

USE_RATE = Statement("""
UPDATE {schema}.actions AS a
SET rate_used_until = greatest(a.rate_used_until, statement_timestamp())
                      + make_interval(secs => u.started * a.rate_interval)
FROM unnest(%(actions)s::int[], %(started)s::int[]) AS u (action_id, started)
WHERE a.id = u.action_id AND a.rate_interval IS NOT NULL
""")

# A frozen process must not keep the lock for longer than its lease.
SHORT = Statement("SELECT set_config('idle_in_transaction_session_timeout', '5000', true)")

# When the next run is due, at places where the claim found no more that were due. It is looked for from the moment of
# the claim on, and not from the present: a run that has become due since then would be missed until the reconciler
# finds it. What was due at that moment already is locked or paused, and a loop would wait for it.
NEXT_DUE = Statement("""
SELECT p.action_id, p.priority, f.run_at
FROM unnest(%(actions)s::int[], %(priorities)s::int[]) AS p (action_id, priority), LATERAL (
    SELECT run_at
    FROM {schema}.runs
    WHERE state = 'pending' AND action_id = p.action_id AND priority = p.priority AND run_at >= %(claimed_at)s
    ORDER BY run_at
    LIMIT 1
) AS f
""")

# So many places at once are shared out, and a claim takes from all of its own.
MANY = 50
LATER = 0.05

# Somebody else is claiming that action just now; a limit is reached and nobody says when it will not be.
CONTENDED = 0.01
BLOCKED = 0.5

LONG_AGO = datetime.fromisoformat("2000-01-01T00:00:00+00:00")
LATEST = datetime.max.replace(tzinfo=UTC)
# An action's id, and a priority.
Place: TypeAlias = tuple[int, int]
# And from when on runs wait there.
Told: TypeAlias = tuple[int, int, datetime]


@dataclass
class Queue:
    """What is known of one action and priority."""

    floor: datetime = LONG_AGO
    # When to look there, on the event loop's clock; None: nothing is known to wait there.
    due: float | None = None
    # Something is known to wait there for a later time, so that it is worth asking for the next.
    later: bool = False
    # At which it is claimed.
    priority: int = 0
    # Of the lines of an action, where the looks at them are.
    ring: ScanCursor | None = None


# What is due: a place, and what is known of it.
Due: TypeAlias = tuple[Place, Queue]


class Wanted(NamedTuple):
    """A place to claim from, and how many at the most."""

    place: Place
    spot: Queue
    most: int
    # After as many, which the same claim has wanted of it already.
    passed: int = 0


@dataclass
class Clock:
    """PostgreSQL's clock beside the event loop's, learnt from the answers. Used for when to look, and nothing else."""

    at: datetime = LONG_AGO
    when: float = 0.0

    def learn(self, at: datetime, when: float) -> None:
        self.at, self.when = at, when

    def instant(self, now: float) -> datetime:
        """What PostgreSQL's clock says now, or a little less: an answer is older than its arrival."""
        return self.at + timedelta(seconds=now - self.when)

    def loop_time(self, instant: datetime) -> float:
        """When that is on the event loop's clock; at once, as long as nothing was learnt."""
        if self.when == 0.0:
            return 0.0
        return self.when + (instant - self.at).total_seconds()


class Backlog:
    """Where runs may be waiting."""

    def __init__(self, catalogue: Catalogue, clock: Clock) -> None:
        self._catalogue = catalogue
        self._clock = clock
        self._spots: dict[Place, Queue] = {}
        # Our part of the places, and how many parts there are.
        self.part = (0, 1)
        # What was told while a claim was under way, whose answer cannot know it.
        self._told: dict[Place, datetime] | None = None

    def tell_all(self, places: Sequence[Told], now: float) -> list[Told]:
        """Runs wait at all these. Where they are many, those of the others are returned, to be told `LATER`."""
        ours, parts = self.part if len(places) > MANY else (0, 1)
        rest = []
        for place in places:
            if place[0] % parts == ours:
                self.tell(*place, now)
            else:
                rest.append(place)
        return rest

    def tell(self, action_id: int, priority: int, run_at: datetime, now: float) -> None:
        """A run waits there from then on."""
        action = self._catalogue.of_id(action_id)
        if action is None:
            return
        place = (action_id, ordered.place_of(priority))
        spot = self._spots.get(place)
        if spot is None:
            spot = self._spots[place] = self._new(place, action, run_at)
        due = max(now, self._clock.loop_time(run_at))
        spot.later |= due > now
        if spot.ring is not None:
            spot.ring.begin()
            due = max(due, spot.ring.rests_until)
        spot.floor = min(spot.floor, run_at)
        spot.due = due if spot.due is None else min(spot.due, due)
        if self._told is not None:
            self._told[place] = min(run_at, self._told.get(place, run_at))

    def tell_ended(self, action_id: int, ordering_key: str) -> None:
        """A run of that line has ended here; the next one may be waiting."""
        spot = self._spots.get((action_id, LINES))
        if spot is not None and spot.ring is not None:
            spot.ring.ask([ordering_key])

    def wait(self, place: Place, due: float) -> None:
        """Look there again at that time: a limit stands in the way until then."""
        spot = self._spots[place]
        spot.due = due
        if spot.ring is not None:
            spot.ring.ended.clear()
            spot.ring.begin()

    def rest(self, spot: Queue, until: float) -> None:
        """Look at no lines before that but those that are asked for."""
        assert spot.ring is not None
        spot.ring.rests_until = until
        if spot.due is not None:
            spot.due = max(spot.due, until)

    def look_at_action(self, action_id: int, now: float) -> None:
        for place, spot in self._spots.items():
            if place[0] == action_id:
                spot.due = now if spot.ring is None else max(now, spot.ring.rests_until)

    def due(self, now: float, most: int = 1000) -> list[Due]:
        """Where to look now: the highest priority first, then, by the second, whoever waits longest.

        Beyond that by chance, so that instances which look in the same moment look at different places.
        """
        found = [
            (place, spot)
            for place, spot in self._spots.items()
            if (spot.due is not None and spot.due <= now) or (spot.ring is not None and spot.ring.ended)
        ]
        if len(found) > 1:
            begin = random.randrange(len(found))
            found = found[begin:] + found[:begin]
            first = found[0][1]
            if any(spot.priority != first.priority or spot.floor != first.floor for _, spot in found):
                found.sort(key=lambda each: (-each[1].priority, each[1].floor.replace(microsecond=0)))
        return found[:most]

    def next_due(self) -> float | None:
        return min((spot.due for spot in self._spots.values() if spot.due is not None), default=None)

    def begin(self) -> None:
        self._told = {}

    def end(self) -> dict[Place, datetime]:
        told, self._told = self._told or {}, None
        return told

    def found(self, place: Place, latest: datetime) -> None:
        """There were as many as were asked for: go on from the last."""
        self._spots[place].floor = latest

    def exhausted(self, place: Place, asked_at: datetime, told: datetime | None) -> None:
        """Nothing more is due there, as of that moment."""
        spot = self._spots[place]
        # A little before it: run_at is when a transaction began, and some commit later than they began.
        spot.floor = asked_at - timedelta(milliseconds=5) if told is None else min(told, asked_at)
        if told is None:
            spot.due = None

    def next_is(self, place: Place, run_at: datetime | None, now: float) -> None:
        spot = self._spots[place]
        spot.later = run_at is not None
        if run_at is not None:
            due = max(now, self._clock.loop_time(run_at))
            spot.due = due if spot.due is None else min(spot.due, due)

    def _new(self, place: Place, action: Action[Any], run_at: datetime) -> Queue:
        if place[1] == LINES:
            return Queue(floor=run_at, priority=action.priority, ring=ScanCursor())
        return Queue(floor=run_at, priority=place[1])


class Claimant:
    """Claims for one instance, through whatever connection it is given."""

    def __init__(self, namespace: Namespace, catalogue: Catalogue, clock: Clock) -> None:
        self.backlog = Backlog(catalogue, clock)
        # Limits go by the table. Our code may not know of one that a newer release has declared; until the reconciler
        # has told, such an action is left to others.
        self.limited: set[int] = set()
        self.clock = clock
        self._namespace = namespace
        self._sql = namespace.sql
        self._catalogue = catalogue
        # Whose turn it is to claim first, where runs wait in lines and otherwise.
        self._lines_first = False
        # Of the claim that is under way: places where nothing is due now, but something is later.
        self._later: list[Place] = []

    async def claim(self, connection: Connection, me: Identity, due: Sequence[Due], room: int, now: float) -> list[Row]:
        """Take what is due at these places, as much as there is room for."""
        rows: list[Row] = []
        self._later = []
        try:
            groups = self._groups(due)
            for number, group in enumerate(groups, 1):
                take = self._take_level if self._is_mixed(group) else self._take_free
                if len(rows) < room:
                    await take(connection, me, group, room, now, rows, last=number == len(groups))
            if self._later:
                await self._ask_for_next(connection, self._later, now)
        except psycopg.Error:
            # What was taken before is ours, and is not to be forgotten over this; the reconciler tells the rest.
            if not rows:
                raise
        return rows

    def _groups(self, due: Sequence[Due]) -> list[Sequence[Due]]:
        """Part places, highest priority first, into as few groups as keep that order.

        One statement takes from places of any priorities, as long as they are neither limited nor lines. A priority
        that has one of those is a group of its own.
        """
        mixed = {spot.priority for place, spot in due if self._is_special(place, spot)}
        if not mixed:
            return [due]
        groups: list[Sequence[Due]] = []
        for _, group in groupby(due, key=lambda each: each[1].priority if each[1].priority in mixed else None):
            groups.append([*group])
        return groups

    async def _take_free(
        self,
        connection: Connection,
        me: Identity,
        group: Sequence[Due],
        room: int,
        now: float,
        rows: list[Row],
        *,
        last: bool,
    ) -> None:
        left = room - len(rows)
        rows += await self._take(connection, me, shares(group, left, last=last), left, now, counted=False)

    async def _take_level(
        self,
        connection: Connection,
        me: Identity,
        level: Sequence[Due],
        room: int,
        now: float,
        rows: list[Row],
        *,
        last: bool,
    ) -> None:
        """Take from places of one priority, which are of several kinds, each kind by its own statement.

        Lines and other places take turns at being first, and have all the room then. Among either, each place has the
        same share; what the others leave of theirs goes to this priority first, and then to lower ones.
        """
        parts = self._in_turn(level)
        for part in parts:
            kinds = self._kinds(part)
            share = -(-(room - len(rows)) // len(part))
            for most in (share,) if last and part is parts[-1] else (share, room):
                for number, (limited, kind) in enumerate(kinds):
                    left = room - len(rows)
                    if left <= 0 or not kind:
                        continue
                    wanted = [Wanted(place, spot, min(most, left)) for place, spot in kind]
                    take = self._take_limited if limited else self._take
                    taken = await take(connection, me, wanted, left, now, counted=limited)
                    rows += taken
                    many = Counter(row[ACTION] for row in taken)
                    kinds[number] = (limited, [each for each in kind if many[each[0][0]] >= share])

    def _in_turn(self, level: Sequence[Due]) -> list[Sequence[Due]]:
        """Part lines from the rest, which are claimed by other statements."""
        parts: list[Sequence[Due]] = [
            [each for each in level if (each[1].ring is not None) is lined] for lined in (True, False)
        ]
        if all(parts):
            self._lines_first = not self._lines_first
        return [part for part in (parts if self._lines_first else parts[::-1]) if part]

    def _kinds(self, part: Sequence[Due]) -> list[tuple[bool, Sequence[Due]]]:
        """Part limited places from others: first those among which a run waits longest."""
        kinds: dict[bool, list[Due]] = {}
        for each in part:
            kinds.setdefault(self._is_limited(each[0][0]), []).append(each)
        return sorted(kinds.items(), key=lambda kind: min(spot.floor for _, spot in kind[1]))

    async def prepare(self, connection: Connection, me: Identity) -> None:
        """Have the claim planned before there is anything to claim."""
        for room in (FEW, FEW + 1):
            await self._take(connection, me, [], room, 0.0, counted=False)

    async def _take(
        self, connection: Connection, me: Identity, wanted: Sequence[Wanted], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """`counted` says that the limits of these actions were looked at, under their lock."""
        if wanted and wanted[0].spot.ring is not None:
            return await self._take_heads(connection, me, wanted, room, now, counted=counted)
        asked_at = self.clock.instant(now)
        values = {
            "me": me.id,
            "name": me.name,
            "actions": array(each.place[0] for each in wanted),
            "priorities": array(each.place[1] for each in wanted),
            "floors": array(each.spot.floor for each in wanted),
            "mosts": array(each.most for each in wanted),
            "passed": array(each.passed for each in wanted),
            "timeouts": array(self._action(each.place[0]).timeout for each in wanted),
            "room": room,
            "counted": counted,
        }
        self.backlog.begin()
        try:
            async with connection.cursor(binary=True) as cursor:
                await cursor.execute(self._sql(CLAIM_FEW if room <= FEW else CLAIM), values)
                rows = await cursor.fetchall()
        finally:
            told = self.backlog.end()
        cut_short = len(rows) >= room or (len(rows) > 0 and (rows[0][FOUND] or 0) > len(rows))
        self._learn(wanted, rows, cut_short, asked_at, told)
        return rows

    def _learn(
        self,
        wanted: Sequence[Wanted],
        rows: Sequence[Row],
        cut_short: bool,
        asked_at: datetime,
        told: Mapping[Place, datetime],
    ) -> None:
        """Learn from an answer where to look next."""
        found: dict[Place, list[datetime]] = {}
        for each in rows:
            found.setdefault((each[ACTION], each[PRIORITY]), []).append(each[RUN_AT])
        for place, (spot, most) in {each.place: (each.spot, each.most) for each in wanted}.items():
            instants = found.get(place, [])
            if not cut_short and len(instants) < most:
                self.backlog.exhausted(place, asked_at, told.get(place))
                if spot.later:
                    self._later.append(place)
            elif instants:
                self.backlog.found(place, min(max(instants), told.get(place, LATEST)))

    async def _take_heads(
        self, connection: Connection, me: Identity, wanted: Sequence[Wanted], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """Take the heads of lines, of one action after another."""
        rows: list[Row] = []
        for place, spot, most, _ in wanted:
            left = min(most, room - len(rows))
            if left <= 0:
                break
            try:
                rows += await self._take_heads_of(connection, me, place, spot, left, now, counted=counted)
            except psycopg.Error:
                # As in `claim`; but what was taken in a transaction is not ours before its end.
                if counted or not rows:
                    raise
                break
        return rows

    async def _take_heads_of(
        self, connection: Connection, me: Identity, place: Place, spot: Queue, most: int, now: float, *, counted: bool
    ) -> list[Row]:
        assert spot.ring is not None
        asked_at = self.clock.instant(now)
        everywhere = spot.due is not None and spot.due <= now
        self.backlog.begin()
        try:
            # Within the transaction of a limit, a savepoint; otherwise the statement is a transaction of its own.
            async with connection.transaction() if counted else nullcontext():
                found = await ordered.claim(
                    connection,
                    self._namespace,
                    me,
                    spot.ring,
                    action=place[0],
                    timeout=self._action(place[0]).timeout,
                    looks=ordered.LOOKS if everywhere else 0,
                    most=most,
                    counted=counted,
                )
        except psycopg.errors.UniqueViolation:
            self.backlog.end()
            self.backlog.wait(place, now + ordered.AGAIN)
            return []
        except BaseException:
            self.backlog.end()
            raise
        told = self.backlog.end().get(place)
        if found is None:
            self.backlog.exhausted(place, asked_at, told)
            return []
        if everywhere and found.complete:
            self.backlog.exhausted(place, asked_at, told)
        if everywhere and (found.complete or told is not None):
            # What was told while we looked may be of a line that this round had come past.
            spot.ring.begin()
        if found.later is not None and (found.complete or not everywhere):
            self.backlog.next_is(place, found.later, now)
        if found.rest > 0:
            self.backlog.rest(spot, asyncio.get_running_loop().time() + found.rest)
        return found.rows

    async def _take_limited(
        self, connection: Connection, me: Identity, wanted: Sequence[Wanted], room: int, now: float, *, counted: bool
    ) -> list[Row]:
        """Take from actions whose limits the whole cluster shares; one claim of an action at a time."""
        by_action = {each.place[0]: each for each in wanted}
        rows: list[Row] = []
        async with connection.transaction():
            await connection.execute(SHORT)
            asked = {"actions": list(by_action)}
            held = [row[0] for row in await (await connection.execute(self._sql(LOCK_LIMITED), asked)).fetchall()]
            answer = await connection.execute(self._sql(ALLOWED), {"actions": held})
            allowed = {identifier: (most, wait) for identifier, most, wait in await answer.fetchall()}
            open_ = [identifier for identifier in by_action if identifier in allowed and allowed[identifier][0] > 0]
            within = [
                by_action[identifier]._replace(most=min(by_action[identifier].most, allowed[identifier][0]))
                for identifier in open_
            ]
            if within:
                rows = await self._take(connection, me, within, room, now, counted=counted)
                started = [sum(each[ACTION] == identifier for each in rows) for identifier in open_]
                await connection.execute(self._sql(USE_RATE), {"actions": open_, "started": started})
        for identifier, each in by_action.items():
            most, wait = allowed.get(identifier, (0, CONTENDED))
            if most <= 0:
                self.backlog.wait(each.place, now + (BLOCKED if wait is None else min(max(wait, 0.001), BLOCKED)))
        return rows

    async def _ask_for_next(self, connection: Connection, places: Sequence[Place], now: float) -> None:
        values = {
            "actions": [place[0] for place in places],
            "priorities": [place[1] for place in places],
            "claimed_at": self.clock.instant(now),
        }
        rows = await (await connection.execute(self._sql(NEXT_DUE), values)).fetchall()
        found = {(row[0], row[1]): row[2] for row in rows}
        for place in places:
            self.backlog.next_is(place, found.get(place), now)

    def _is_mixed(self, group: Sequence[Due]) -> bool:
        return any(self._is_special(place, spot) for place, spot in group)

    def _is_special(self, place: Place, spot: Queue) -> bool:
        return spot.ring is not None or self._is_limited(place[0])

    def _is_limited(self, identifier: int) -> bool:
        return identifier in self.limited or self._action(identifier).limited

    def _action(self, identifier: int) -> Action[Any]:
        action = self._catalogue.of_id(identifier)
        assert action is not None, "only places of our own actions are ready here"
        return action


def shares(places: Sequence[Due], room: int, *, last: bool) -> list[Wanted]:
    """Give each place of one priority the same share, so that a flood of one action does not starve the others.

    What they leave of it goes to the same priority, and then to lower ones: so they are asked twice, for their share
    and then for more. Not the lowest priority, if it is the last: the next claim goes on there.
    """
    levels = [[*level] for _, level in groupby(places, key=lambda each: each[1].priority)]
    wanted = []
    for number, level in enumerate(levels, 1):
        share = -(-room // len(level))
        wanted += [Wanted(place, spot, share) for place, spot in level]
        if len(level) > 1 and not (last and number == len(levels)):
            wanted += [Wanted(place, spot, room, share) for place, spot in level]
    return wanted
