WITH own AS MATERIALIZED (
    SELECT r.id
    FROM "flotilla".runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND r.state COLLATE "C" = 'running'
    FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE "flotilla".runs AS r
SET checkpoint = c.state::json
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[]) AS c (id, token, state)
WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = c.id AND r.token = c.token AND r.state COLLATE "C" = 'running'
RETURNING r.id, r.token
