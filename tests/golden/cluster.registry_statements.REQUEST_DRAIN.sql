UPDATE "flotilla".instances
SET drain_requested_at = coalesce(drain_requested_at, clock_timestamp()), drain_reason = %(reason)s
WHERE name = %(name)s AND state <> 'gone'
RETURNING id
