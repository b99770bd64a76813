SELECT id FROM ((
        SELECT id
        FROM (
            SELECT r.id FROM "flotilla".runs AS r WHERE r.state = 'running' AND r.id < %(before)s AND r.id > %(after)s OFFSET 0
        ) AS running
        ORDER BY id DESC
        LIMIT %(limit)s
    )) AS branches ORDER BY id DESC LIMIT %(limit)s
