"""The statement that claims ordered runs: the heads of ordering keys. `engine/dispatch/ordered.py` has the protocol.

The head of a key is the unfinished run with the lowest id. `scan` steps from key to key through the index
`runs_ordered`: from the key after `after` to the last one, and then from the first one to `start`. `ended` has the
heads of the keys that the caller asks for. A head that another session has locked is left out. `is_pending` reads the
state of the head again, without the index of pending runs.
"""

from app.fleet.db.namespace import Statement
from app.fleet.runs.claim import CLAIMED_COLUMNS, ME, PICKED, WEIGHT, claimed_sql
from app.fleet.runs.effects.states import is_pending

# Two columns about a head `h`: whether it may be claimed, and its `run_at` if that is later than now.
JUDGED = """
        CASE
            WHEN h.state = 'pending' AND h.run_at <= statement_timestamp() THEN (
                SELECT true
                FROM {schema}.runs AS o
                WHERE o.action_id = %(action)s::int AND o.ordering_key = h.ordering_key AND o.state = 'running'
                LIMIT 1
            ) IS NULL
            ELSE false
        END AS free,
        CASE WHEN h.state = 'pending' AND h.run_at > statement_timestamp() THEN h.run_at END AS later"""

CLAIM_ORDERED = Statement(f"""
WITH RECURSIVE {ME}, open AS MATERIALIZED (
    SELECT a.id
    FROM me, {{schema}}.actions AS a
    WHERE a.id = %(action)s::int AND a.paused_at IS NULL
      AND (%(counted)s OR (a.concurrency IS NULL AND a.rate_interval IS NULL))
), scan AS (
    SELECT %(after)s::text COLLATE "C" AS key, %(wrapped)s::bool AS wrapped, 0 AS looked, 0 AS found,
           NULL::int8 AS head, NULL::timestamptz AS later
    FROM open
    UNION ALL
    SELECT n.ordering_key, n.wrapped, s.looked + 1, s.found + n.free::int, CASE WHEN n.free THEN n.id END, n.later
    FROM scan AS s, LATERAL (
        SELECT h.id, h.ordering_key, h.wrapped, {JUDGED}
        FROM (
            (
                SELECT *
                FROM (
                    SELECT id, ordering_key, state, run_at, s.wrapped
                    FROM {{schema}}.runs
                    WHERE action_id = %(action)s::int AND ordering_key > s.key
                    ORDER BY ordering_key, id
                    LIMIT 1
                ) AS next
                WHERE NOT s.wrapped OR ordering_key <= %(start)s::text
            )
            UNION ALL
            (
                SELECT id, ordering_key, state, run_at, true
                FROM {{schema}}.runs
                WHERE NOT s.wrapped AND action_id = %(action)s::int AND ordering_key <= %(start)s::text
                ORDER BY ordering_key, id
                LIMIT 1
            )
            LIMIT 1
        ) AS h
    ) AS n
    WHERE s.looked < %(looks)s AND s.found < %(most)s
), ended AS MATERIALIZED (
    SELECT h.id, {JUDGED}
    FROM open, unnest(%(keys)s::text[]) AS k (key), LATERAL (
        SELECT id, ordering_key, state, run_at
        FROM {{schema}}.runs
        WHERE action_id = %(action)s::int AND ordering_key = k.key
        ORDER BY id
        LIMIT 1
    ) AS h
), heads AS (
    SELECT head, later FROM scan
    UNION ALL
    -- Without the heads that the scan has found: each would be counted twice.
    SELECT CASE WHEN free THEN id END, later FROM ended WHERE id NOT IN (SELECT head FROM scan WHERE head IS NOT NULL)
), found AS MATERIALIZED (
    SELECT r.id, r.weight
    FROM heads AS h, LATERAL (
        SELECT id, {WEIGHT} AS weight
        FROM {{schema}}.runs
        WHERE id = h.head AND {is_pending("runs")} AND run_at <= statement_timestamp()
        FOR UPDATE SKIP LOCKED
    ) AS r
    LIMIT %(most)s
), {PICKED}, {claimed_sql("%(timeout)s::float8")}
SELECT came.*, c.*
FROM (
    SELECT key, wrapped, looked, found, (SELECT min(later) FROM heads) AS later, (SELECT many FROM total) AS ready
    FROM scan
    ORDER BY looked DESC
    LIMIT 1
) AS came
LEFT JOIN (SELECT {CLAIMED_COLUMNS} FROM claimed) AS c ON true
""")
# How many columns come before those of a claimed run: the state of the scan.
SCAN_COLUMNS = 6
