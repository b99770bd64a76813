WITH back AS (
    UPDATE "flotilla".runs AS r
    SET state = 'pending', attempt = r.attempt - 1, deadline_at = NULL, events = r.events + 1
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS u (id, token)
    WHERE r.id = u.id AND r.token = u.token AND r.state COLLATE "C" = 'running'
    RETURNING r.id, r.events, r.running_seq, r.started_at, r.instance, r.attempt, r.run_at, r.action_id, r.priority, r.ordering_key, r.attempt + 1 AS ran,
              'the answer to its claim was lost on the way' AS why
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
    
)
SELECT action_id, CASE WHEN ordering_key IS NULL THEN priority END, run_at, id FROM back
