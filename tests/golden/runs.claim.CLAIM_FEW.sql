WITH me AS MATERIALIZED (
    SELECT id FROM "flotilla".instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
), places AS (
    SELECT *
    FROM unnest(%(actions)s::int[], %(priorities)s::int[], %(floors)s::timestamptz[], %(mosts)s::int[],
                %(passed)s::int[], %(timeouts)s::float8[])
         WITH ORDINALITY AS p (action_id, priority, floor, most, passed, timeout, place)
), found AS MATERIALIZED (
    SELECT r.id, r.weight
    FROM (SELECT * FROM places ORDER BY place) AS p, LATERAL (
        SELECT id, 0 AS weight
        FROM "flotilla".runs
        WHERE state = 'pending' AND ordering_key IS NULL AND action_id = p.action_id AND priority = p.priority
          AND run_at >= p.floor AND run_at <= statement_timestamp()
        ORDER BY run_at, id
        LIMIT coalesce((
            SELECT p.most
            FROM "flotilla".actions AS a
            WHERE a.id = p.action_id AND a.paused_at IS NULL AND EXISTS (SELECT FROM me)
              AND (%(counted)s OR (a.concurrency IS NULL AND a.rate_interval IS NULL))
        ), 0)
        OFFSET p.passed
        FOR UPDATE SKIP LOCKED
    ) AS r
    ORDER BY p.place
    LIMIT %(room)s
), picked AS (SELECT id FROM found), claimed AS (
    UPDATE "flotilla".runs AS r
    SET state = 'running', token = r.token + 1, attempt = r.attempt + 1, instance_id = %(me)s, instance = %(name)s,
        events = r.events + 1, running_seq = r.events + 1,
        started_at = clock_timestamp(), deadline_at = clock_timestamp() + make_interval(secs => p.timeout)
    FROM places AS p
    WHERE r.id = ANY (ARRAY(SELECT id FROM picked)) AND p.action_id = r.action_id AND p.priority = r.priority
    RETURNING r.*
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT 'running', instance, count(*), array_agg(id), array_agg(action_id), array_agg(events), array_agg(attempt)
    FROM claimed
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
)
SELECT id, action_id, token, attempt, deaths, max_attempts, priority, trigger, scheduled_for,
       payload::text, checkpoint::text, events, ordering_key, request_id, trace_parent,
       cancel_requested_at IS NOT NULL, run_at, NULL::int8 FROM claimed
