SELECT id FROM ((
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE TRUE AND (r.action_id, r.state, r.id) > (%(action_id)s, 'failed', %(after)s) AND (r.action_id, r.state, r.id) < (%(action_id)s, 'failed', %(before)s)
        ORDER BY r.action_id DESC, r.state DESC, r.id DESC
        LIMIT %(limit)s
    )) AS branches ORDER BY id DESC LIMIT %(limit)s
