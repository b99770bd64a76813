WITH removed AS (
    DELETE FROM "flotilla".runs
    WHERE id = ANY (ARRAY(
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE r.id = ANY (%(ids)s::int8[]) AND r.action_id = %(action)s AND r.state = 'pending'
        ORDER BY r.id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING *, 'cancelled' AS ended_as, NULL AS ended_with, 'cancelled on request, while it waited' AS ended_by
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT ended_as, instance, count(*), array_agg(id), array_agg(action_id), array_agg(events + 1), array_agg(attempt)
    FROM removed
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
), notified AS (
    
    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM (
    SELECT action_id, priority, ordering_key, clock_timestamp() AS run_at FROM removed WHERE ordering_key IS NOT NULL
) AS n) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page

), ended AS (
    
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
RETURNING *
)
SELECT ended.id FROM ended, (SELECT count(*) FROM notified) AS n
