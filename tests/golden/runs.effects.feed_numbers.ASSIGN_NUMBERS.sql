WITH last AS MATERIALIZED (
    SELECT coalesce((SELECT first + many - 1 FROM "flotilla".feed WHERE first IS NOT NULL ORDER BY first DESC LIMIT 1), 0) AS number
), new AS MATERIALIZED (
    SELECT id, sum(many) OVER (ORDER BY id) - many AS before
    FROM (
        SELECT id, many
        FROM "flotilla".feed
        WHERE first IS NULL AND id > %(after)s AND id <= %(top)s
        ORDER BY id
        LIMIT 1000
    ) AS n
), numbered AS (
    UPDATE "flotilla".feed AS f
    SET first = (SELECT number FROM last) + 1 + n.before
    FROM new AS n
    WHERE f.id = n.id
    RETURNING f.id, f.many
)
SELECT (SELECT number FROM last) + coalesce(sum(many), 0)::int8, count(*), coalesce(max(id), 0),
       pg_snapshot_xmin(pg_current_snapshot())::text::int8, pg_snapshot_xmax(pg_current_snapshot())::text::int8,
       CASE WHEN count(*) = 1000
            THEN (SELECT id FROM "flotilla".feed WHERE first IS NULL ORDER BY id DESC LIMIT 1) END
FROM numbered
