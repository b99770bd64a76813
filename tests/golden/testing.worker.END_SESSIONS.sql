SELECT pg_terminate_backend(pid, %(milliseconds)s)
FROM pg_catalog.pg_stat_activity
WHERE application_name = %(name)s AND datname = current_database()
