UPDATE "flotilla".instances
SET heartbeat_at = clock_timestamp(), state = %(state)s, running = %(running)s, clock_ahead = %(ahead)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
RETURNING drain_requested_at IS NOT NULL, drain_reason, clock_timestamp()
