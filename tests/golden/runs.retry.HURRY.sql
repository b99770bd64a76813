WITH hurried AS (
    UPDATE "flotilla".runs
    SET run_at = clock_timestamp()
    WHERE id = %(id)s AND state = 'pending' AND run_at > clock_timestamp()
    RETURNING *
), notified AS (
    
    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM hurried) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page

)
SELECT 
r.id, a.name AS action, r.state, r.trigger, coalesce(r.payload, '{}'::json) AS payload, r.scheduled_for, r.run_at,
r.ordering_key, r.attempt, r.max_attempts, r.instance, NULL::json AS result, r.error, r.progress,
r.triggered_by, r.request_id, substr(r.trace_parent, 4, 32) AS trace_id, r.created_at, r.started_at, NULL::timestamptz AS finished_at

FROM hurried AS r
JOIN "flotilla".actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
