UPDATE "flotilla".actions SET next_run_at = %(slot)s WHERE id = %(action)s
