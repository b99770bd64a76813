UPDATE "flotilla".instances
SET heartbeat_at = clock_timestamp(), server_started_at = pg_postmaster_start_time()
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
