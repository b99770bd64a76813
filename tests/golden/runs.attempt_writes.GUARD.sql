SELECT id FROM "flotilla".runs AS r WHERE id = %(id)s AND token = %(token)s AND r.state COLLATE "C" = 'running' FOR KEY SHARE
