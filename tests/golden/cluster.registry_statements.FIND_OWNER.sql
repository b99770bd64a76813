SELECT name, hostname, pid, started_at FROM "flotilla".instances WHERE id = %(id)s
