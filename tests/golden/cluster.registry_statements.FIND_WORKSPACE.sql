SELECT id FROM "flotilla".instances WHERE workspace = %(value)s AND state <> 'gone'
