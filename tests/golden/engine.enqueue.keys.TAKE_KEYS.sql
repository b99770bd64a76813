INSERT INTO "flotilla".run_keys (action_id, key, run_id, digest)
SELECT action_id, key, coalesce(id, nextval('"flotilla".runs_id_seq')), digest
FROM (
    SELECT *
    FROM unnest(%(actions)s::int[], %(keys)s::text[], %(digests)s::text[], %(ids)s::int8[])
         AS k (action_id, key, digest, id)
    ORDER BY action_id, key
) AS k
ON CONFLICT DO NOTHING
RETURNING action_id, key, run_id
