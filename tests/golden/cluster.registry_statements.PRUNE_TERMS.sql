DELETE FROM "flotilla".leader_terms WHERE began_at < clock_timestamp() - interval '7 days'
