WITH ended AS (
    SELECT *
    FROM unnest(%(ids)s::int8[], %(tokens)s::int8[], %(states)s::text[], %(results)s::text[], %(errors)s::text[])
         AS e (id, token, state, result, error)
), removed AS (
    DELETE FROM "flotilla".runs AS r
    USING ended AS e
    WHERE r.id = ANY (%(ids)s::int8[]) AND r.id = e.id AND r.token = e.token AND r.state COLLATE "C" = 'running'
    RETURNING r.*, coalesce(e.state, 'succeeded') AS ended_as, e.result AS ended_with, e.error AS ended_by
), feed_rows AS (
    
    INSERT INTO "flotilla".feed (state, instance, many, runs, actions, seqs, attempts)
    SELECT ended_as, instance, count(*), array_agg(id), array_agg(action_id), array_agg(events + 1), array_agg(attempt)
    FROM removed
    WHERE (SELECT kept > '0' FROM "flotilla".feed_settings)
    GROUP BY 1, 2
    
)

INSERT INTO "flotilla".finished_runs (
    id, action_id, state, priority, run_at, token, instance, attempt, max_attempts, trigger, scheduled_for, key,
    ordering_key, payload, checkpoint, progress, result, error, events, running_seq, created_at, started_at,
    triggered_by, request_id, trace_parent, finished_at, expires_at
)
SELECT r.id, r.action_id, r.ended_as, r.priority, r.run_at, r.token, r.instance, r.attempt, r.max_attempts, r.trigger,
       r.scheduled_for, r.key, r.ordering_key, r.payload, r.checkpoint, r.progress, r.ended_with::json, r.ended_by,
       r.events + 1, r.running_seq, r.created_at, r.started_at, r.triggered_by, r.request_id, r.trace_parent,
       clock_timestamp(), clock_timestamp() + (SELECT retention FROM "flotilla".actions AS a WHERE a.id = r.action_id)
FROM removed AS r
RETURNING id
