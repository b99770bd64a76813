SELECT (SELECT coalesce(max(token), 0) FROM "flotilla".once_keys) AS last_token,
       (SELECT coalesce(max(run_id), 0) FROM "flotilla".run_keys) AS last_run
