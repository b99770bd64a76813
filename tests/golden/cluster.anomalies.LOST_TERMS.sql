SELECT count(*), min(t.began_at), string_agg(DISTINCT t.instance, ', ' ORDER BY t.instance)
FROM (
    SELECT id, instance_id, instance, began_at,
           lead(id) OVER (ORDER BY id) IS NOT NULL AS ended,
           lead(id) OVER (PARTITION BY instance_id ORDER BY id) IS NULL AS last
    FROM "flotilla".leader_terms
    WHERE began_at > clock_timestamp() - %(within)s
) AS t
WHERE t.ended
  AND NOT EXISTS (
      SELECT FROM "flotilla".instances AS i
      WHERE i.id = t.instance_id
        AND (i.role = 'web' OR (t.last AND (i.state = 'draining' OR i.gone_reason = 'left')))
  )
