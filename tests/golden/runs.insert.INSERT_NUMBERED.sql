WITH added AS (
    INSERT INTO "flotilla".runs (id, key, action_id, priority, run_at, max_attempts, payload, trigger,
                               triggered_by, request_id, trace_parent)
    SELECT id, key, action_id, priority, coalesce(run_at, now()), max_attempts, payload::json, %(trigger)s,
           %(triggered_by)s::int8, %(request_id)s::text, %(trace_parent)s::text
    FROM unnest(%(ids)s::int8[], %(keys)s::text[], %(actions)s::int[], %(priorities)s::int[], %(run_ats)s::timestamptz[],
                %(max_attempts)s::int[], %(payloads)s::text[])
         WITH ORDINALITY AS o (id, key, action_id, priority, run_at, max_attempts, payload, ordinal)
    ORDER BY ordinal
    RETURNING id, run_at, created_at, action_id, priority, ordering_key, events, attempt, instance
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT 'pending', instance, count(*), array_agg(id), array_agg(action_id), array_agg(events), array_agg(attempt)
    FROM added
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
), notified AS (
    
    SELECT pg_notify('flotilla', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM added) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page

), marked AS (
    INSERT INTO "flotilla".run_keys (action_id, key, run_id, digest)
    SELECT 0, %(mark)s::text, min(id), string_agg(id::text, ',' ORDER BY id)
    FROM added
    WHERE %(mark)s::text IS NOT NULL
    HAVING count(*) > 0
)
SELECT id, run_at, created_at FROM added, (SELECT count(*) FROM notified) AS n ORDER BY id
