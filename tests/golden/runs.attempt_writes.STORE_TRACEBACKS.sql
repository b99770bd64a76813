WITH stored AS (
    INSERT INTO "flotilla".run_tracebacks (run_id, token, attempt, instance, error, traceback)
    SELECT r.id, r.token, r.attempt, r.instance, t.error, t.traceback
    FROM "flotilla".runs AS r
    JOIN unnest(%(ids)s::int8[], %(tokens)s::int8[], %(errors)s::text[], %(tracebacks)s::text[])
         AS t (id, token, error, traceback) USING (id, token)
    WHERE r.id = ANY (%(ids)s::int8[]) AND r.state COLLATE "C" = 'running'
    ON CONFLICT DO NOTHING
    RETURNING run_id, token
)
DELETE FROM "flotilla".run_tracebacks AS t
USING stored AS s
WHERE t.run_id = ANY (%(ids)s::int8[]) AND t.run_id = s.run_id AND t.token <= s.token - 20
