"""How a run is claimed: pending becomes running, on one instance, with a token that only grows.

Which runs are claimed first, from which queues: `engine/dispatch/__init__.py`. This file has the statements.

One statement finds runs with `FOR UPDATE SKIP LOCKED` and claims them, under three conditions:

- The instance is live at the commit. Its row is locked FOR KEY SHARE; a transaction that declares it gone locks the row
  FOR UPDATE. Either the claim commits first, and that transaction finds its runs; or the instance is gone, and the
  claim finds nothing. So no run can be `running` on an instance that is gone without being found.
- The action was not paused when the statement began. A claim that is under way during a pause may still start runs.
- The limits of the action (`concurrency`, `rate`) allow it. The transaction locks the action's row (LOCK_LIMITED), and
  then reads the limits in a second statement (ALLOWED), because a statement sees what was committed when it began.
  So claims of one limited action take turns. `concurrency` is exact. For `rate`: in any period, all instances together
  start at most `burst + rate × (seconds + RATE_TOLERANCE)` runs.

A claim has four parts: who claims (`ME`), which runs it finds (a CTE `found` with their ids and weights, locked), how
many of them one claim may carry (`PICKED`), and the change itself (`claimed_sql`). Ordered runs are found in another
way (`claim_ordered.py`).

A claim carries at most MAX_WEIGHT bytes of payloads and checkpoints; the next claim takes the rest.

Lock order: actions by id (only for limits), instance, runs.
"""

from typing import Any, TypeAlias

from app.fleet.db.namespace import Statement
from app.fleet.duration import RATE_TOLERANCE
from app.fleet.runs.effects.feed import feed_insert_sql

Row: TypeAlias = tuple[Any, ...]

ME = """me AS MATERIALIZED (
    SELECT id FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
)"""


def claimed_sql(timeout: str, beside: str = "", condition: str = "true") -> str:
    """Return the CTEs `claimed` and `feed_rows`; `beside` and `condition` join what `timeout` needs to a run `r`."""
    return f"""claimed AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'running', token = r.token + 1, attempt = r.attempt + 1, instance_id = %(me)s, instance = %(name)s,
        events = r.events + 1, running_seq = r.events + 1,
        started_at = clock_timestamp(), deadline_at = clock_timestamp() + make_interval(secs => {timeout})
    {beside}
    WHERE r.id = ANY (ARRAY(SELECT id FROM picked)) AND {condition}
    RETURNING r.*
), feed_rows AS (
    {feed_insert_sql("claimed", "'running'")}
)"""


# The columns of a claimed run: first the columns for its `Attempt`, then those for the dispatcher.
CLAIMED_COLUMNS = """id, action_id, token, attempt, deaths, max_attempts, priority, trigger, scheduled_for,
       payload::text, checkpoint::text, events, ordering_key, request_id, trace_parent,
       cancel_requested_at IS NOT NULL, run_at"""
# Positions in a claimed row: `WIDTH` columns of an attempt, whether its cancellation is requested, and `run_at`.
WIDTH = 15
ACTION, PRIORITY, SCHEDULED_FOR, EVENTS, KEY, TRACE_PARENT, RUN_AT = 1, 6, 8, 11, 12, 14, WIDTH + 1
# The last column of CLAIM: how many runs were found, if they are too heavy together; NULL otherwise.
FOUND = WIDTH + 2

# Bytes. One statement returns all payloads and checkpoints of a claim, and psycopg reads its answer at once.
MAX_WEIGHT = 16 * 1024 * 1024
# PostgreSQL knows only the compressed size of a compressed value without reading it. A value is rarely a hundred times
# as large.
COMPRESSION = 100


def weight_sql(column: str) -> str:
    return f"""coalesce(pg_column_size({column})
                 * CASE WHEN pg_column_compression({column}) IS NULL THEN 1 ELSE {COMPRESSION} END, 0)"""


# About how many bytes a run adds to a claim. Many runs have neither a payload nor a checkpoint.
WEIGHT = f"""CASE WHEN payload IS NOT NULL OR checkpoint IS NOT NULL
                 THEN {weight_sql("payload")} + {weight_sql("checkpoint")} ELSE 0 END"""

# As many of the runs in `found` as one claim may carry, and always the first. Usually that is all of them; then no
# running sum is computed.
PICKED = f"""total AS MATERIALIZED (
    SELECT count(*) AS many, sum(weight) AS weight FROM found
), picked AS MATERIALIZED (
    SELECT id
    FROM found
    WHERE (SELECT weight FROM total) <= {MAX_WEIGHT}
    UNION ALL
    SELECT id
    FROM (SELECT id, sum(weight) OVER (ROWS UNBOUNDED PRECEDING) - weight AS before FROM found) AS f
    WHERE (SELECT weight FROM total) > {MAX_WEIGHT} AND before < {MAX_WEIGHT}
)"""
TOO_MANY = f"(SELECT many FROM total WHERE weight > {MAX_WEIGHT})"


def claim_sql(weight: str, picked: str, too_many: str) -> str:
    """Return the statement that claims runs from several queues, in their order, up to a number of runs.

    `ORDER BY` has the order in which the rows come anyway, so nothing is sorted and no row too many is locked. `passed`
    is how many runs an earlier entry for the same queue takes.
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
        WHERE state = 'pending' AND ordering_key IS NULL AND action_id = p.action_id AND priority = p.priority
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
), {picked}, {claimed_sql("p.timeout", "FROM places AS p", "p.action_id = r.action_id AND p.priority = r.priority")}
SELECT {CLAIMED_COLUMNS}, {too_many} FROM claimed
"""


CLAIM = Statement(claim_sql(WEIGHT, PICKED, TOO_MANY))
# For so few runs that they cannot be too heavy together.
CLAIM_FEW = Statement(claim_sql("0", "picked AS (SELECT id FROM found)", "NULL::int8"))

# Actions whose row another transaction has locked are left out. The caller tries them again soon.
LOCK_LIMITED = Statement("""
SELECT id FROM {schema}.actions WHERE id = ANY (%(actions)s) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
""")

# How many runs each action may start now, and after how many seconds its rate allows the next one. `rate_used_until`
# moves on by one interval for each start (GCRA); it may be ahead of the clock by the burst and the tolerance. Without
# the tolerance, a rate would be lost between two claims: with a burst of 1, each claim could start one run. An action
# without any limit (a newer release has removed it) allows all.
ALLOWED = Statement(f"""
SELECT a.id,
       greatest(0, least(
           2147483647,
           CASE WHEN a.concurrency IS NOT NULL THEN a.concurrency - (
               SELECT count(*) FROM {{schema}}.runs AS r WHERE r.action_id = a.id AND r.state = 'running'
           ) END,
           floor(
               a.rate_burst + 1e-6
               + ({RATE_TOLERANCE} - extract(epoch FROM greatest(a.rate_used_until, statement_timestamp())
                                                    - statement_timestamp())) / a.rate_interval
           )
       ))::int AS allowed,
       extract(epoch FROM a.rate_used_until - statement_timestamp())::float8
       - (a.rate_burst - 1) * a.rate_interval - {RATE_TOLERANCE} AS seconds
FROM {{schema}}.actions AS a
WHERE a.id = ANY (%(actions)s)
""")

USE_RATE = Statement("""
UPDATE {schema}.actions AS a
SET rate_used_until = greatest(a.rate_used_until, statement_timestamp())
                      + make_interval(secs => u.started * a.rate_interval)
FROM unnest(%(actions)s::int[], %(started)s::int[]) AS u (action_id, started)
WHERE a.id = u.action_id AND a.rate_interval IS NOT NULL
""")

# When the next run is due, in queues in which a claim found no more due runs. The search begins at the moment of that
# claim and not at the present: a run that has become due since then would be missed until the reconciler finds it. The
# search leaves out runs that were due at that moment and were not claimed: they are locked, or their action is paused,
# and it would find them each time.
NEXT_DUE = Statement("""
SELECT p.action_id, p.priority, f.run_at
FROM unnest(%(actions)s::int[], %(priorities)s::int[]) AS p (action_id, priority), LATERAL (
    SELECT run_at
    FROM {schema}.runs
    WHERE state = 'pending' AND ordering_key IS NULL AND action_id = p.action_id AND priority = p.priority
      AND run_at >= %(claimed_at)s
    ORDER BY run_at
    LIMIT 1
) AS f
""")
