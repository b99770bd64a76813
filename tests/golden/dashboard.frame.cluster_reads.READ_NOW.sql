SELECT clock_timestamp(), ARRAY(
    SELECT i.port
    FROM "flotilla".instances AS i
    WHERE i.state = 'ready' AND i.role <> 'worker' AND i.hostname = %(hostname)s AND i.port <> %(port)s
    ORDER BY i.port
    LIMIT 10
)
