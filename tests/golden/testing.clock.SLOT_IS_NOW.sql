UPDATE "flotilla".actions SET next_run_at = clock_timestamp() WHERE id = %(action)s
