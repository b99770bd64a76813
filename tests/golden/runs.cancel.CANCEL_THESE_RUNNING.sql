WITH asked AS (
    UPDATE "flotilla".runs
    SET cancel_requested_at = coalesce(cancel_requested_at, clock_timestamp())
    WHERE id = ANY (ARRAY(
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE r.id = ANY (%(ids)s::int8[]) AND r.action_id = %(action)s AND r.state = 'running'
        ORDER BY r.id
        FOR UPDATE SKIP LOCKED
    ))
    RETURNING *
), notified AS (
    SELECT pg_notify('flotilla', 'cancel:' || id) FROM asked
)
SELECT asked.id FROM asked, (SELECT count(*) FROM notified) AS n
