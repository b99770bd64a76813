SELECT w.id, coalesce(
        (
            SELECT r.id
            FROM "flotilla".runs AS r
            WHERE r.action_id = w.id AND r.state = 'running'
            ORDER BY r.action_id, r.instance_id
            LIMIT 1
        ),
        (
            SELECT r.id
            FROM "flotilla".runs AS r
            WHERE r.action_id = w.id AND r.state = 'pending'
            ORDER BY r.action_id, r.id
            LIMIT 1
        )
    ) FROM unnest(%(actions)s::int[]) AS w (id)
