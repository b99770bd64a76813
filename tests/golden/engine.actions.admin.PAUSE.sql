UPDATE "flotilla".actions SET paused_at = clock_timestamp() WHERE id = %(id)s AND paused_at IS NULL
