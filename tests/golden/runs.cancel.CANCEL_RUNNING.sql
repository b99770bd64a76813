WITH asked AS (
    UPDATE "flotilla".runs
    SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE id = %(id)s AND state = 'running'
    RETURNING *
), notified AS (
    SELECT pg_notify('flotilla', 'cancel:' || id) FROM asked
)

SELECT 
r.id, a.name AS action, r.state, r.trigger, coalesce(r.payload, '{}'::json) AS payload, r.scheduled_for, r.run_at,
r.ordering_key, r.attempt, r.max_attempts, r.instance, NULL::json AS result, r.error, r.progress,
r.triggered_by, r.request_id, substr(r.trace_parent, 4, 32) AS trace_id, r.created_at, r.started_at, NULL::timestamptz AS finished_at

FROM asked AS r
JOIN "flotilla".actions AS a ON a.id = r.action_id, (SELECT count(*) FROM notified) AS n
