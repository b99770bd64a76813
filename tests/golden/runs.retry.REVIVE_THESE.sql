WITH back AS (
    DELETE FROM "flotilla".finished_runs WHERE id = ANY (ARRAY(
        SELECT f.id
        FROM "flotilla".finished_runs AS f
        WHERE f.id = ANY (%(ids)s::int8[]) AND f.action_id = %(action)s AND f.state = %(state)s
          AND f.expires_at > 'epoch'
        ORDER BY f.id
        LIMIT %(most)s
        FOR UPDATE SKIP LOCKED
    )) RETURNING *
), added AS (
    INSERT INTO "flotilla".runs (
        id, action_id, priority, run_at, token, instance, max_attempts, trigger, scheduled_for, key, ordering_key,
        payload, checkpoint, progress, error, events, created_at, triggered_by, request_id, trace_parent
    )
    SELECT id, action_id, priority, clock_timestamp(), token, instance, max_attempts, trigger, scheduled_for, key,
           ordering_key, payload, checkpoint, progress, error, events + 1, created_at, triggered_by, request_id,
           trace_parent
    FROM back
    RETURNING *
), written AS (
    
    INSERT INTO "flotilla".run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, 'state', s.data, s.at
    FROM back AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.attempt, 'instance', b.instance),
         b.started_at),
        (b.events, json_build_object('state', b.state, 'attempt', b.attempt, 'instance', b.instance,
                                     'result', b.result, 'error', b.error), b.finished_at),
        (b.events + 1, json_build_object('state', 'pending', 'attempt', 0, 'instance', b.instance,
                                         'error', 'tried again on request'), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    ON CONFLICT DO NOTHING
    
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
