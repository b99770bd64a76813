UPDATE "flotilla".instances
SET connection_out_seconds = %(seconds)s
WHERE id = %(id)s AND run_id = %(run_id)s AND state <> 'gone'
