SELECT id FROM "flotilla".instances WHERE id = %(id)s AND state <> 'gone' FOR UPDATE
