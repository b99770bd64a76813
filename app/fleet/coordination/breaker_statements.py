"""The statements of breakers: each is one transition of the row, and a transaction of its own.

    statement            changes the row if                              the breaker
    COUNT_FAILURE        it is closed                                    stays closed, or opens
    ENTER_AS_PROBE       its rest is over, and no other probe can end    stays open, with this probe
    PROBE_SUCCEEDED      the token is still this probe's                 closes
    PROBE_FAILED         the token is still this probe's                 opens again, for twice as long
    PROBE_ABANDONED      the token is still this probe's                 stays open, without a probe
    CLOSE_BY_HAND        it is open                                      closes (`breaker_admin.py`)

The token only grows; together with `probe_instance` it identifies the probe whose result still counts. So the result of
a probe that runs while the breaker is closed by hand changes nothing. Except for ENTER_AS_PROBE and CLOSE_BY_HAND, the
statements return the new state: for how many seconds the breaker stays open (NULL if it is closed), and for how many
seconds its last failure counts. A transition that other instances need at once notifies them.
"""

from app.fleet.db.namespace import Statement

STATE = """extract(epoch FROM b.open_until - clock_timestamp())::float8 AS open_seconds,
    extract(epoch FROM (SELECT max(at) FROM unnest(b.failed_at) AS at) - clock_timestamp())::float8
    + %(within)s::float8 AS failure_seconds"""

NOTIFY = "pg_notify('{channel}', 'breaker:' || name)"

READ = Statement(f"SELECT {STATE} FROM {{schema}}.breakers AS b WHERE b.name = %(name)s")

INSERT = Statement("INSERT INTO {schema}.breakers (name) VALUES (%(name)s) ON CONFLICT (name) DO NOTHING")

# Keeps only the failures that still count. Notifies when the breaker opens, and at the first failure, because other
# instances may use a state without failures for long (`breakers.py`).
COUNT_FAILURE = Statement(f"""
WITH closed AS MATERIALIZED (
    SELECT name, failed_at
    FROM {{schema}}.breakers
    WHERE name = %(name)s AND open_until IS NULL
    FOR UPDATE
), counted AS MATERIALIZED (
    SELECT c.name,
           clock_timestamp() || ARRAY(
               SELECT at
               FROM unnest(c.failed_at) AS at
               WHERE at > clock_timestamp() - make_interval(secs => %(within)s::float8)
               ORDER BY at DESC
           ) AS failed_at
    FROM closed AS c
), decided AS MATERIALIZED (
    SELECT name, failed_at, cardinality(failed_at) >= %(failures)s AS opens FROM counted
), updated AS (
    UPDATE {{schema}}.breakers AS b
    SET failed_at = CASE WHEN d.opens THEN '{{}}' ELSE d.failed_at END,
        open_until = CASE WHEN d.opens THEN clock_timestamp() + make_interval(secs => %(rest)s::float8) END,
        openings = CASE WHEN d.opens THEN 1 ELSE 0 END,
        token = b.token + CASE WHEN d.opens THEN 1 ELSE 0 END
    FROM decided AS d
    WHERE b.name = d.name
    RETURNING b.name, cardinality(b.failed_at) < 2 AS notifies, {STATE}
)
SELECT open_seconds, failure_seconds, CASE WHEN notifies THEN {NOTIFY} END FROM updated
""")

# Another probe can end while its instance lives and its time is not over.
ENTER_AS_PROBE = Statement("""
UPDATE {schema}.breakers AS b
SET token = b.token + 1, probe_instance = %(me)s,
    probe_until = clock_timestamp() + make_interval(secs => %(probe_timeout)s::float8)
WHERE b.name = %(name)s AND b.open_until <= clock_timestamp()
  AND (
      b.probe_instance IS NULL OR b.probe_until <= clock_timestamp()
      OR EXISTS (SELECT FROM {schema}.instances AS i WHERE i.id = b.probe_instance AND i.state = 'gone')
  )
RETURNING b.token
""")

OWN_PROBE = "b.name = %(name)s AND b.token = %(token)s AND b.probe_instance IS NOT NULL"

PROBE_SUCCEEDED = Statement(f"""
WITH updated AS (
    UPDATE {{schema}}.breakers AS b
    SET open_until = NULL, openings = 0, failed_at = '{{}}', probe_instance = NULL, probe_until = NULL
    WHERE {OWN_PROBE}
    RETURNING b.name, {STATE}
)
SELECT open_seconds, failure_seconds, {NOTIFY} FROM updated
""")

PROBE_FAILED = Statement(f"""
WITH updated AS (
    UPDATE {{schema}}.breakers AS b
    SET open_until = clock_timestamp() + make_interval(secs => least(
            %(rest)s::float8 * 2 ^ least(b.openings, 30), greatest(%(rest)s::float8, %(max_rest)s::float8)
        )),
        openings = b.openings + 1, token = b.token + 1, probe_instance = NULL, probe_until = NULL
    WHERE {OWN_PROBE}
    RETURNING b.name, {STATE}
)
SELECT open_seconds, failure_seconds, {NOTIFY} FROM updated
""")

PROBE_ABANDONED = Statement(f"""
WITH updated AS (
    UPDATE {{schema}}.breakers AS b
    SET probe_instance = NULL, probe_until = NULL
    WHERE {OWN_PROBE}
    RETURNING b.name, {STATE}
)
SELECT open_seconds, failure_seconds, {NOTIFY} FROM updated
""")

CLOSE_BY_HAND = Statement(f"""
WITH updated AS (
    UPDATE {{schema}}.breakers AS b
    SET open_until = NULL, openings = 0, failed_at = '{{}}', token = b.token + 1, probe_instance = NULL,
        probe_until = NULL
    WHERE b.name = %(name)s AND b.open_until IS NOT NULL
    RETURNING b.name, b.token
)
SELECT token, {NOTIFY} FROM updated
""")
