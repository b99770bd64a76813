SELECT id FROM ((
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE r.state = 'pending' AND (r.action_id, r.id) > (%(action_id)s, %(after)s) AND (r.action_id, r.id) < (%(action_id)s, %(before)s)
        ORDER BY r.action_id DESC, r.id DESC
        LIMIT %(limit)s
    )) AS branches ORDER BY id DESC LIMIT %(limit)s
