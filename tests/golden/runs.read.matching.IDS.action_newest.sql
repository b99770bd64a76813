SELECT id FROM ((
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE r.state = 'pending' AND (r.action_id, r.id) > (%(action_id)s, %(after)s) AND (r.action_id, r.id) < (%(action_id)s, %(before)s)
        ORDER BY r.action_id DESC, r.id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT id
        FROM (
            SELECT r.id FROM "flotilla".runs AS r WHERE r.state = 'running' AND r.action_id = %(action_id)s AND r.id < %(before)s AND r.id > %(after)s OFFSET 0
        ) AS running
        ORDER BY id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE TRUE AND (r.action_id, r.state, r.id) > (%(action_id)s, 'succeeded', %(after)s) AND (r.action_id, r.state, r.id) < (%(action_id)s, 'succeeded', %(before)s)
        ORDER BY r.action_id DESC, r.state DESC, r.id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE TRUE AND (r.action_id, r.state, r.id) > (%(action_id)s, 'failed', %(after)s) AND (r.action_id, r.state, r.id) < (%(action_id)s, 'failed', %(before)s)
        ORDER BY r.action_id DESC, r.state DESC, r.id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE TRUE AND (r.action_id, r.state, r.id) > (%(action_id)s, 'cancelled', %(after)s) AND (r.action_id, r.state, r.id) < (%(action_id)s, 'cancelled', %(before)s)
        ORDER BY r.action_id DESC, r.state DESC, r.id DESC
        LIMIT %(limit)s
    )) AS branches ORDER BY id DESC LIMIT %(limit)s
