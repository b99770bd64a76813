WITH updated AS (
    UPDATE "flotilla".breakers AS b
    SET open_until = NULL, openings = 0, failed_at = '{}', token = b.token + 1, probe_instance = NULL,
        probe_until = NULL
    WHERE b.name = %(name)s AND b.open_until IS NOT NULL
    RETURNING b.name, b.token
)
SELECT token, pg_notify('flotilla', 'breaker:' || name) FROM updated
