WITH slots AS MATERIALIZED (
    SELECT *, 'slot:' || to_char(slot AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US') AS key
    FROM unnest(%(actions)s::int[], %(slots)s::timestamptz[], %(jitters)s::float8[], %(alone)s::bool[])
         AS s (action_id, slot, jitter, alone)
    WHERE NOT (alone AND coalesce(
        (
            SELECT r.id
            FROM "flotilla".runs AS r
            WHERE r.action_id = s.action_id AND r.state = 'running'
            ORDER BY r.action_id, r.instance_id
            LIMIT 1
        ),
        (
            SELECT r.id
            FROM "flotilla".runs AS r
            WHERE r.action_id = s.action_id AND r.state = 'pending'
            ORDER BY r.action_id, r.id
            LIMIT 1
        )
    ) IS NOT NULL)
), new AS (
    INSERT INTO "flotilla".run_keys (action_id, key, run_id)
    SELECT action_id, key, nextval('"flotilla".runs_id_seq')
    FROM slots
    ORDER BY action_id, slot
    ON CONFLICT DO NOTHING
    RETURNING action_id, key, run_id
), added AS (
    INSERT INTO "flotilla".runs (id, action_id, priority, run_at, max_attempts, trigger, scheduled_for)
    SELECT n.run_id, s.action_id, a.priority, s.slot + make_interval(secs => s.jitter * random()), a.max_attempts,
           'schedule', s.slot
    FROM new AS n
    JOIN slots AS s ON s.action_id = n.action_id AND s.key = n.key
    JOIN "flotilla".actions AS a ON a.id = s.action_id
    RETURNING id, action_id, priority, ordering_key, run_at, events, attempt, instance
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

)
SELECT (SELECT count(*) FROM added), (SELECT count(*) FROM notified)
