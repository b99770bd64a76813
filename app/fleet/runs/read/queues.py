"""Reading which queues have pending runs: a step through an index for each queue, however many runs wait in it."""

# The CTE `queues` has one row for each queue: the run of it that is due first. For `WITH RECURSIVE`.
QUEUES = """queues_by_priority AS (
    (
        SELECT action_id, priority, ordering_key, run_at
        FROM {schema}.runs
        WHERE state = 'pending' AND ordering_key IS NULL
        ORDER BY action_id, priority, run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.*
    FROM queues_by_priority AS q, LATERAL (
        SELECT action_id, priority, ordering_key, run_at
        FROM {schema}.runs
        WHERE state = 'pending' AND ordering_key IS NULL AND (action_id, priority) > (q.action_id, q.priority)
        ORDER BY action_id, priority, run_at
        LIMIT 1
    ) AS n
), queues_of_ordered AS (
    (
        SELECT action_id, priority, ordering_key, run_at
        FROM {schema}.runs
        WHERE state = 'pending' AND ordering_key IS NOT NULL
        ORDER BY action_id, run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.*
    FROM queues_of_ordered AS q, LATERAL (
        SELECT action_id, priority, ordering_key, run_at
        FROM {schema}.runs
        WHERE state = 'pending' AND ordering_key IS NOT NULL AND action_id > q.action_id
        ORDER BY action_id, run_at
        LIMIT 1
    ) AS n
), queues AS (
    SELECT * FROM queues_by_priority
    UNION ALL
    SELECT * FROM queues_of_ordered
)"""
