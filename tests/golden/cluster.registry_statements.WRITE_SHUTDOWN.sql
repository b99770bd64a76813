UPDATE "flotilla".instances SET shutdown = %(shutdown)s WHERE id = %(id)s
