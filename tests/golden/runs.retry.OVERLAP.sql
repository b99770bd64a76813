SELECT overlap FROM "flotilla".actions WHERE id = %(action)s
