"""How a run is taken: pending becomes running, here, with a token nobody had before.

Every claim has four parts: who claims (`ME`), which runs are found (a CTE called `found` with their ids, locked), how
many of them are not too heavy for one claim (`PICKED`), and this, which is the same for all (`taken`). Who claims is
locked FOR KEY SHARE in the same statement: whoever declares an instance gone locks its row FOR UPDATE, so a claim is
either seen by that death or finds nobody to claim for.
"""

from typing import Any, TypeAlias

from app.fleet.runs.feed import feed_insert_sql

Row: TypeAlias = tuple[Any, ...]

ME = """me AS MATERIALIZED (
    SELECT id FROM {schema}.instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
)"""


def taken(timeout: str, beside: str = "", matching: str = "true") -> str:
    """Return the CTEs `claimed` and `noted`; `beside` and `matching` join what `timeout` needs, of a run `r`."""
    return f"""claimed AS (
    UPDATE {{schema}}.runs AS r
    SET state = 'running', token = r.token + 1, attempt = r.attempt + 1, instance_id = %(me)s, instance = %(name)s,
        events = r.events + 1, running_seq = r.events + 1,
        started_at = clock_timestamp(), deadline_at = clock_timestamp() + make_interval(secs => {timeout})
    {beside}
    WHERE r.id = ANY (ARRAY(SELECT id FROM picked)) AND {matching}
    RETURNING r.*
), noted AS (
    {feed_insert_sql("claimed", "'running'")}
)"""


def row(priority: str = "priority") -> str:
    """Return the columns that a claim answers with: first what `Run` takes, then what the executor needs."""
    return f"""id, action_id, token, attempt, deaths, max_attempts, {priority}, trigger, scheduled_for, payload::text,
       checkpoint::text, events, ordering_key, cancel_requested_at IS NOT NULL, run_at"""


# The payloads and checkpoints of one claim, in bytes: one statement has them all, and its answer is read at once.
HEAVY = 16 * 1024 * 1024
# Of a compressed value, only the stored size is known without reading it. It is rarely a hundredth of the value's.
COMPRESSED = 100


def weight(column: str) -> str:
    return f"""coalesce(pg_column_size({column})
                 * CASE WHEN pg_column_compression({column}) IS NULL THEN 1 ELSE {COMPRESSED} END, 0)"""


# Of a run: about how many bytes it adds to a claim. Many have neither.
WEIGHT = f"""CASE WHEN payload IS NOT NULL OR checkpoint IS NOT NULL
                 THEN {weight("payload")} + {weight("checkpoint")} ELSE 0 END"""

# Of the CTE `found` with `id` and `weight`, as many as a claim may have; the first one always. Usually that is all of
# them, and then no sum is made for each.
PICKED = f"""total AS MATERIALIZED (
    SELECT count(*) AS many, sum(weight) AS weight FROM found
), picked AS MATERIALIZED (
    SELECT id
    FROM found
    WHERE (SELECT weight FROM total) <= {HEAVY}
    UNION ALL
    SELECT id
    FROM (SELECT id, sum(weight) OVER (ROWS UNBOUNDED PRECEDING) - weight AS before FROM found) AS f
    WHERE (SELECT weight FROM total) > {HEAVY} AND before < {HEAVY}
)"""

WIDTH = 13
# Where these stand in it.
ACTION, PRIORITY, KEY, RUN_AT = 1, 6, 12, WIDTH + 1
# If the runs that were found are too heavy together: how many they are. NULL otherwise, which costs nothing to read.
TOO_MANY = f"(SELECT many FROM total WHERE weight > {HEAVY})"
FOUND = WIDTH + 2
