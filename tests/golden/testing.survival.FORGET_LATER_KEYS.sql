WITH keys_of_runs AS (DELETE FROM "flotilla".run_keys WHERE run_id > %(last_run)s)
DELETE FROM "flotilla".once_keys WHERE token > %(last_token)s
