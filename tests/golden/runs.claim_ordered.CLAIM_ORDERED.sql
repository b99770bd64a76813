WITH RECURSIVE me AS MATERIALIZED (
    SELECT id FROM "flotilla".instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
), open AS MATERIALIZED (
    SELECT a.id
    FROM me, "flotilla".actions AS a
    WHERE a.id = %(action)s::int AND a.paused_at IS NULL
      AND (%(counted)s OR (a.concurrency IS NULL AND a.rate_interval IS NULL))
), scan AS (
    SELECT %(after)s::text COLLATE "C" AS key, %(wrapped)s::bool AS wrapped, 0 AS looked, 0 AS found,
           NULL::int8 AS head, NULL::timestamptz AS later
    FROM open
    UNION ALL
    SELECT n.ordering_key, n.wrapped, s.looked + 1, s.found + n.free::int, CASE WHEN n.free THEN n.id END, n.later
    FROM scan AS s, LATERAL (
        SELECT h.id, h.ordering_key, h.wrapped, 
        CASE
            WHEN h.state = 'pending' AND h.run_at <= statement_timestamp() THEN (
                SELECT true
                FROM "flotilla".runs AS o
                WHERE o.action_id = %(action)s::int AND o.ordering_key = h.ordering_key AND o.state = 'running'
                LIMIT 1
            ) IS NULL
            ELSE false
        END AS free,
        CASE WHEN h.state = 'pending' AND h.run_at > statement_timestamp() THEN h.run_at END AS later
        FROM (
            (
                SELECT *
                FROM (
                    SELECT id, ordering_key, state, run_at, s.wrapped
                    FROM "flotilla".runs
                    WHERE action_id = %(action)s::int AND ordering_key > s.key
                    ORDER BY ordering_key, id
                    LIMIT 1
                ) AS next
                WHERE NOT s.wrapped OR ordering_key <= %(start)s::text
            )
            UNION ALL
            (
                SELECT id, ordering_key, state, run_at, true
                FROM "flotilla".runs
                WHERE NOT s.wrapped AND action_id = %(action)s::int AND ordering_key <= %(start)s::text
                ORDER BY ordering_key, id
                LIMIT 1
            )
            LIMIT 1
        ) AS h
    ) AS n
    WHERE s.looked < %(looks)s AND s.found < %(most)s
), ended AS MATERIALIZED (
    SELECT h.id, 
        CASE
            WHEN h.state = 'pending' AND h.run_at <= statement_timestamp() THEN (
                SELECT true
                FROM "flotilla".runs AS o
                WHERE o.action_id = %(action)s::int AND o.ordering_key = h.ordering_key AND o.state = 'running'
                LIMIT 1
            ) IS NULL
            ELSE false
        END AS free,
        CASE WHEN h.state = 'pending' AND h.run_at > statement_timestamp() THEN h.run_at END AS later
    FROM open, unnest(%(keys)s::text[]) AS k (key), LATERAL (
        SELECT id, ordering_key, state, run_at
        FROM "flotilla".runs
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
        SELECT id, CASE WHEN payload IS NOT NULL OR checkpoint IS NOT NULL
                 THEN coalesce(pg_column_size(payload)
                 * CASE WHEN pg_column_compression(payload) IS NULL THEN 1 ELSE 100 END, 0) + coalesce(pg_column_size(checkpoint)
                 * CASE WHEN pg_column_compression(checkpoint) IS NULL THEN 1 ELSE 100 END, 0) ELSE 0 END AS weight
        FROM "flotilla".runs
        WHERE id = h.head AND runs.state COLLATE "C" = 'pending' AND run_at <= statement_timestamp()
        FOR UPDATE SKIP LOCKED
    ) AS r
    LIMIT %(most)s
), total AS MATERIALIZED (
    SELECT count(*) AS many, sum(weight) AS weight FROM found
), picked AS MATERIALIZED (
    SELECT id
    FROM found
    WHERE (SELECT weight FROM total) <= 16777216
    UNION ALL
    SELECT id
    FROM (SELECT id, sum(weight) OVER (ROWS UNBOUNDED PRECEDING) - weight AS before FROM found) AS f
    WHERE (SELECT weight FROM total) > 16777216 AND before < 16777216
), claimed AS (
    UPDATE "flotilla".runs AS r
    SET state = 'running', token = r.token + 1, attempt = r.attempt + 1, instance_id = %(me)s, instance = %(name)s,
        events = r.events + 1, running_seq = r.events + 1,
        started_at = clock_timestamp(), deadline_at = clock_timestamp() + make_interval(secs => %(timeout)s::float8)
    
    WHERE r.id = ANY (ARRAY(SELECT id FROM picked)) AND true
    RETURNING r.*
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT 'running', instance, count(*), array_agg(id), array_agg(action_id), array_agg(events), array_agg(attempt)
    FROM claimed
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
)
SELECT came.*, c.*
FROM (
    SELECT key, wrapped, looked, found, (SELECT min(later) FROM heads) AS later, (SELECT many FROM total) AS ready
    FROM scan
    ORDER BY looked DESC
    LIMIT 1
) AS came
LEFT JOIN (SELECT id, action_id, token, attempt, deaths, max_attempts, priority, trigger, scheduled_for,
       payload::text, checkpoint::text, events, ordering_key, request_id, trace_parent,
       cancel_requested_at IS NOT NULL, run_at FROM claimed) AS c ON true
