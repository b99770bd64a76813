UPDATE "flotilla".actions
SET paused_at = NULL, next_run_at = %(next)s
WHERE id = %(id)s
RETURNING pg_notify('flotilla', 'slots:')
