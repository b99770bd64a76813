SELECT name, id FROM "flotilla".actions WHERE name = ANY (%(names)s)
