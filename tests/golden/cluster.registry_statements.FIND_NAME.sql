SELECT id FROM "flotilla".instances WHERE name = %(value)s AND state <> 'gone'
