UPDATE "flotilla".instances
SET state = 'gone', gone_at = clock_timestamp(), gone_reason = %(reason)s, running = 0
WHERE id = %(id)s AND state <> 'gone'
RETURNING id, name
