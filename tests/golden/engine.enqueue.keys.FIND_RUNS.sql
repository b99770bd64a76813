SELECT k.action_id, k.key, k.run_id, k.digest
FROM "flotilla".run_keys AS k
JOIN unnest(%(actions)s::int[], %(keys)s::text[]) AS w (action_id, key) USING (action_id, key)
