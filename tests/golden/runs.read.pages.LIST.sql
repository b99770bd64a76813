SELECT r.id, a.name AS action, r.state, r.trigger,
           CASE WHEN r.payload IS NULL THEN '{}' WHEN short.payload THEN r.payload END AS payload,
           r.scheduled_for, r.run_at, r.ordering_key, r.attempt, r.max_attempts, r.instance,
           CASE WHEN short.result THEN NULL::json END AS result,
           CASE WHEN short.error THEN r.error END AS error,
           CASE WHEN short.progress THEN r.progress END AS progress,
           r.triggered_by, r.request_id, substr(r.trace_parent, 4, 32) AS trace_id, r.created_at, r.started_at,
           NULL::timestamptz AS finished_at,
           CASE WHEN false IN (short.payload, short.result, short.error, short.progress)
                THEN json_strip_nulls(json_build_object(
                    'payload', CASE WHEN NOT short.payload THEN left(r.payload::text, 200) END,
                    'result', CASE WHEN NOT short.result THEN left(NULL::json::text, 200) END,
                    'error', CASE WHEN NOT short.error THEN left(r.error, 200) END,
                    'progress', CASE WHEN NOT short.progress THEN left(r.progress::text, 200) END
                ))
                ELSE '{}' END AS truncated
    FROM "flotilla".runs AS r
    JOIN "flotilla".actions AS a ON a.id = r.action_id, LATERAL (
        SELECT pg_column_size(r.payload) <= 1028 AND octet_length(r.payload::text) <= 1024 AS payload, pg_column_size(NULL::json) <= 1028 AND octet_length(NULL::json::text) <= 1024 AS result,
               pg_column_size(r.error) <= 1028 AND octet_length(r.error::text) <= 1024 AS error, pg_column_size(r.progress) <= 1028 AND octet_length(r.progress::text) <= 1024 AS progress
        OFFSET 0
    ) AS short
     WHERE r.id = ANY (%(ids)s) UNION ALL 
    SELECT r.id, a.name AS action, r.state, r.trigger,
           CASE WHEN r.payload IS NULL THEN '{}' WHEN short.payload THEN r.payload END AS payload,
           r.scheduled_for, r.run_at, r.ordering_key, r.attempt, r.max_attempts, r.instance,
           CASE WHEN short.result THEN r.result END AS result,
           CASE WHEN short.error THEN r.error END AS error,
           CASE WHEN short.progress THEN r.progress END AS progress,
           r.triggered_by, r.request_id, substr(r.trace_parent, 4, 32) AS trace_id, r.created_at, r.started_at,
           r.finished_at AS finished_at,
           CASE WHEN false IN (short.payload, short.result, short.error, short.progress)
                THEN json_strip_nulls(json_build_object(
                    'payload', CASE WHEN NOT short.payload THEN left(r.payload::text, 200) END,
                    'result', CASE WHEN NOT short.result THEN left(r.result::text, 200) END,
                    'error', CASE WHEN NOT short.error THEN left(r.error, 200) END,
                    'progress', CASE WHEN NOT short.progress THEN left(r.progress::text, 200) END
                ))
                ELSE '{}' END AS truncated
    FROM "flotilla".finished_runs AS r
    JOIN "flotilla".actions AS a ON a.id = r.action_id, LATERAL (
        SELECT pg_column_size(r.payload) <= 1028 AND octet_length(r.payload::text) <= 1024 AS payload, pg_column_size(r.result) <= 1028 AND octet_length(r.result::text) <= 1024 AS result,
               pg_column_size(r.error) <= 1028 AND octet_length(r.error::text) <= 1024 AS error, pg_column_size(r.progress) <= 1028 AND octet_length(r.progress::text) <= 1024 AS progress
        OFFSET 0
    ) AS short
     WHERE r.id = ANY (%(ids)s)
