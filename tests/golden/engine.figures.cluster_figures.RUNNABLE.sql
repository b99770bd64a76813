SELECT name, runs, oldest_seconds FROM "flotilla".runnable_runs ORDER BY name
