SELECT count(*) FROM ((
        SELECT r.id
        FROM "flotilla".runs AS r
        WHERE r.triggered_by IS NOT NULL AND (r.triggered_by, r.id) > (%(run)s, %(after)s) AND (r.triggered_by, r.id) < (%(run)s, %(before)s)
        ORDER BY r.triggered_by DESC, r.id DESC
        LIMIT %(limit)s
    ) UNION ALL (
        SELECT r.id
        FROM "flotilla".finished_runs AS r
        WHERE r.triggered_by IS NOT NULL AND (r.triggered_by, r.id) > (%(run)s, %(after)s) AND (r.triggered_by, r.id) < (%(run)s, %(before)s)
        ORDER BY r.triggered_by DESC, r.id DESC
        LIMIT %(limit)s
    )) AS branches
