UPDATE "flotilla".actions SET rate_used_until = clock_timestamp()
WHERE name = %(action)s AND rate_used_until > clock_timestamp()
