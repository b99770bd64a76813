WITH lost AS MATERIALIZED (
    SELECT id, deaths + 1 >= 20 OR cancel_requested_at IS NOT NULL AS deadly
    FROM "flotilla".runs
    WHERE state = 'running' AND instance_id = ANY (%(dead)s)
    LIMIT 1000
    FOR UPDATE SKIP LOCKED
), removed AS (
    DELETE FROM "flotilla".runs AS r
    USING lost AS l
    WHERE r.id = l.id AND l.deadly
    RETURNING r.*, CASE WHEN r.cancel_requested_at IS NULL THEN 'failed' ELSE 'cancelled' END AS ended_as, NULL AS ended_with, CASE WHEN r.cancel_requested_at IS NULL THEN format('%%s instances died while they ran it, the last of them %%s', r.deaths + 1, r.instance) ELSE 'cancelled on request' END AS ended_by
), failed AS (
    
INSERT INTO "flotilla".finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, scheduled_for, key,
    ordering_key, payload, checkpoint, progress, result, error, events, running_seq, created_at, started_at,
    triggered_by, request_id, trace_parent, finished_at, expires_at
)
SELECT r.id, r.action_id, r.ended_as, r.priority, r.run_at, r.token, r.instance, r.attempt, r.max_attempts, r.trigger,
       r.scheduled_for, r.key, r.ordering_key, r.payload, r.checkpoint, r.progress, r.ended_with::json, r.ended_by,
       r.events + 1, r.running_seq, r.created_at, r.started_at, r.triggered_by, r.request_id, r.trace_parent,
       clock_timestamp(), clock_timestamp() + (SELECT retention FROM "flotilla".actions AS a WHERE a.id = r.action_id)
FROM removed AS r

), ended_feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT ended_as, instance, count(*), array_agg(id), array_agg(action_id), array_agg(events + 1), array_agg(attempt)
    FROM removed
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
), back AS (
    UPDATE "flotilla".runs AS r
    SET state = 'pending', deaths = r.deaths + 1, deadline_at = NULL, events = r.events + 1,
        error = format('the instance %%s died while it ran it', r.instance)
    FROM lost AS l
    WHERE r.id = l.id AND NOT l.deadly
    RETURNING r.id, r.events, r.running_seq, r.started_at, r.instance, r.attempt, r.run_at, r.action_id, r.priority, r.ordering_key, r.attempt AS ran, r.error AS why
), written AS (
    
    INSERT INTO "flotilla".run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, 'state', s.data, s.at
    FROM back AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.ran, 'instance', b.instance), b.started_at),
        (b.events, json_build_object('state', 'pending', 'attempt', b.attempt, 'instance', b.instance,
                                     'run_at', to_char(b.run_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'error', b.why), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT 'pending', instance, count(*), array_agg(id), array_agg(action_id), array_agg(events), array_agg(attempt)
    FROM back
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
), notified AS (
    
    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM (
    SELECT action_id, priority, ordering_key, run_at FROM back UNION ALL SELECT * FROM (
    SELECT action_id, priority, ordering_key, clock_timestamp() AS run_at FROM removed WHERE ordering_key IS NOT NULL
) AS n
) AS w) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page

)
SELECT (SELECT count(*) FROM lost), (SELECT count(*) FROM notified)
