SELECT state FROM "flotilla".instances WHERE id = %(id)s
