WITH own AS MATERIALIZED (
    SELECT r.id
    FROM "flotilla".runs AS r
    WHERE r.id = ANY (%(ids)s::int8[]) AND r.state COLLATE "C" = 'running' AND r.cancel_requested_at IS NULL
    FOR NO KEY UPDATE SKIP LOCKED
), back AS (
    UPDATE "flotilla".runs AS r
    SET state = 'pending',
        run_at = CASE
            WHEN b.paused THEN r.run_at
            ELSE clock_timestamp() + make_interval(secs => coalesce(b.delay, (
            SELECT least(a.retry_delay * 2.0 ^ least(r.attempt - r.deaths - 1, 60), a.max_retry_delay)
                   * (0.75 + 0.5 * random())
            FROM "flotilla".actions AS a
            WHERE a.id = r.action_id
        )))
        END,
        attempt = r.attempt - b.paused::int,
        error = coalesce(b.error, r.error),
        events = r.events + 1,
        deadline_at = NULL
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(pauses)s::bool[], %(delays)s::float8[], %(errors)s::text[])
         AS b (id, token, paused, delay, error)
    WHERE r.id = ANY (ARRAY(SELECT id FROM own)) AND r.id = b.id AND r.token = b.token AND r.state COLLATE "C" = 'running'
    RETURNING r.id, r.events, r.running_seq, r.started_at, r.instance, r.attempt, r.run_at, r.action_id, r.priority, r.ordering_key, r.attempt + b.paused::int AS ran, b.error AS why
), written AS (
    
    INSERT INTO "flotilla".run_events (run_id, seq, kind, data, at)
    SELECT b.id, s.seq, 'state', s.data, s.at
    FROM back AS b, LATERAL (VALUES
        (b.running_seq, json_build_object('state', 'running', 'attempt', b.ran, 'instance', b.instance), b.started_at),
        (b.events, json_build_object('state', 'pending', 'attempt', b.attempt, 'instance', b.instance,
                                     'run_at', to_char(b.run_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'), 'error', b.why), clock_timestamp())
    ) AS s (seq, data, at)
    WHERE s.seq IS NOT NULL
    
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT 'pending', instance, count(*), array_agg(id), array_agg(action_id), array_agg(events), array_agg(attempt)
    FROM back
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
), notified AS (
    
    SELECT pg_notify('flotilla', %(heading)s::text || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / 200 AS page
        FROM (SELECT action_id, run_at, CASE WHEN ordering_key IS NULL THEN priority END AS queue_priority FROM back) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page

)
SELECT id FROM back, (SELECT count(*) FROM notified) AS n
