SELECT count(*) FROM (
        SELECT f.id
        FROM "flotilla".finished_runs AS f
        WHERE (f.action_id, f.state, f.id) > (%(action)s, %(first_state)s, 0)
          AND (f.action_id, f.state, f.id) <= (%(action)s, %(last_state)s, 9223372036854775807)
          AND f.state = ANY (%(states)s::text[])
          AND f.expires_at > 'epoch'
          AND f.finished_at >= coalesce(%(since)s::timestamptz, '-infinity') AND f.finished_at <= %(until)s
        ORDER BY f.action_id, f.state, f.id
        LIMIT %(most)s
) AS f
