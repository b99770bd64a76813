UPDATE "flotilla".actions SET rate_used_until = '-infinity' WHERE name = %(action)s
