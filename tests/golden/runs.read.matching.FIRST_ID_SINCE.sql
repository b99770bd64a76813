WITH RECURSIVE bounds AS (
    SELECT 0::int8 AS low, 1 + greatest(
        (SELECT max(id) FROM "flotilla".runs), (SELECT max(id) FROM "flotilla".finished_runs), 0
    ) AS high
    UNION ALL
    SELECT CASE WHEN p.created_at < %(since)s THEN greatest(p.id, b.low) + 1 ELSE b.low END,
           CASE WHEN p.created_at < %(since)s THEN b.high ELSE (b.low + b.high) / 2 END
    FROM bounds AS b
    LEFT JOIN LATERAL (
        SELECT e.id, e.created_at
        FROM (
            (SELECT id, created_at FROM "flotilla".runs WHERE id >= (b.low + b.high) / 2 ORDER BY id LIMIT 1)
            UNION ALL
            (SELECT id, created_at FROM "flotilla".finished_runs WHERE id >= (b.low + b.high) / 2 ORDER BY id LIMIT 1)
        ) AS e
        ORDER BY e.id
        LIMIT 1
    ) AS p ON true
    WHERE b.low < b.high
)
SELECT low FROM bounds ORDER BY high - low LIMIT 1
