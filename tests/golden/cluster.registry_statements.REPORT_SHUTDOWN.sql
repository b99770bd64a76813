UPDATE "flotilla".instances
SET shutdown = %(shutdown)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
  AND jsonb_array_length(coalesce(shutdown, '[]')) <= jsonb_array_length(%(shutdown)s)
