SELECT token, attempt, instance, error, traceback, at
FROM "flotilla".run_tracebacks
WHERE run_id = %(id)s
ORDER BY token DESC
LIMIT %(limit)s
