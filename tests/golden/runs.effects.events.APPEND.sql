WITH batch AS (
    SELECT *, row_number() OVER (PARTITION BY run_id ORDER BY ordinal) AS nth
    FROM unnest(%(run_ids)s::int8[], %(tokens)s::int8[], %(kinds)s::text[], %(data)s::text[], %(befores)s::int[])
         WITH ORDINALITY AS e (run_id, token, kind, data, before, ordinal)
), locked AS MATERIALIZED (
    SELECT r.id
    FROM "flotilla".runs AS r
    WHERE r.id = ANY (%(run_ids)s::int8[]) AND r.state COLLATE "C" = 'running'
    FOR NO KEY UPDATE SKIP LOCKED
), counted AS (
    UPDATE "flotilla".runs AS r
    SET events = r.events + g.added,
        progress = coalesce(g.progress::json, r.progress)
    FROM (
        SELECT run_id, token, count(*)::int AS added, min(before) AS before,
               (array_agg(data ORDER BY ordinal DESC) FILTER (WHERE kind = 'progress'))[1] AS progress
        FROM batch
        GROUP BY run_id, token
    ) AS g
    WHERE r.id = ANY (ARRAY(SELECT id FROM locked)) AND r.id = g.run_id AND r.token = g.token AND r.state COLLATE "C" = 'running'
      AND r.events = coalesce(g.before, r.events)
    RETURNING r.id, r.token, r.events - g.added AS before
), written AS (
    INSERT INTO "flotilla".run_events (run_id, seq, kind, data)
    SELECT g.run_id, c.before + g.nth, g.kind, g.data::json
    FROM batch AS g
    JOIN counted AS c ON c.id = g.run_id AND c.token = g.token
)
SELECT id, token FROM counted
