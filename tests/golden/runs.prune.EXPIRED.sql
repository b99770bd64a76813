SELECT id, events, expires_at
FROM "flotilla".finished_runs
WHERE expires_at >= %(floor)s AND expires_at < statement_timestamp()
ORDER BY expires_at
LIMIT %(batch)s
