SELECT id FROM ((
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE TRUE AND r.id < %(before)s AND r.id > %(after)s
        ORDER BY r.id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE TRUE AND r.id < %(before)s AND r.id > %(after)s
        ORDER BY r.id DESC
        LIMIT %(limit)s
    )) AS branches ORDER BY id DESC LIMIT %(limit)s
