DELETE FROM "flotilla".run_events
WHERE run_id = %(id)s AND seq > %(after)s AND seq <= %(upto)s
