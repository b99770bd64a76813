WITH requested AS MATERIALIZED (
    SELECT * FROM unnest(%(runs)s::int8[], %(afters)s::int[]) AS w (id, after)
), found AS MATERIALIZED (
    SELECT w.after, r.id, r.action_id, r.events, false AS ended, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, NULL::timestamptz AS finished_at,
           NULL::json AS result, r.error
    FROM requested AS w
    JOIN "flotilla".runs AS r ON r.id = w.id
    UNION ALL
    SELECT w.after, r.id, r.action_id, r.events, true, r.state, r.attempt, r.instance, r.running_seq,
           r.trigger, r.scheduled_for, r.created_at, r.started_at, r.finished_at,
           r.result, r.error
    FROM requested AS w
    JOIN "flotilla".finished_runs AS r ON r.id = w.id AND r.expires_at > 'epoch'
), page AS (
    SELECT e.run_id, e.seq, e.kind, e.data, e.at
    FROM found AS k, LATERAL (
        SELECT *, sum(octet_length(data::text)) OVER (ORDER BY seq) - octet_length(data::text) AS before
        FROM "flotilla".run_events
        WHERE run_id = k.id AND seq > k.after AND seq <= k.after + %(limit)s
    ) AS e
    WHERE coalesce(e.before, 0) < %(max_bytes)s
    UNION ALL
    SELECT id, 1, 'state', json_build_object('state', 'pending', 'attempt', 0, 'instance', NULL, 'trigger', trigger,
                                             'scheduled_for', to_char(scheduled_for AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')), created_at
    FROM found
    WHERE after < 1
    UNION ALL
    SELECT id, running_seq, 'state', json_build_object('state', 'running', 'attempt', attempt, 'instance', instance),
           started_at
    FROM found AS k
    WHERE running_seq > after AND running_seq <= after + %(limit)s AND (ended OR k.state COLLATE "C" = 'running')
      AND NOT EXISTS (SELECT FROM "flotilla".run_events AS e WHERE e.run_id = k.id AND e.seq = k.running_seq)
    UNION ALL
    SELECT id, events, 'state', json_build_object('state', state, 'attempt', attempt, 'instance', instance,
                                                  'result', result, 'error', error), finished_at
    FROM found
    WHERE ended AND events > after AND events <= after + %(limit)s
)
SELECT id, action_id, events, ended, NULL::int, NULL::text, NULL::text, NULL::timestamptz FROM found
UNION ALL
SELECT run_id, 0, 0, false, seq, kind, data::text, at FROM page
ORDER BY 1, 5 NULLS FIRST
