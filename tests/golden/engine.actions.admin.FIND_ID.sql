SELECT id FROM "flotilla".actions WHERE name = %(name)s
