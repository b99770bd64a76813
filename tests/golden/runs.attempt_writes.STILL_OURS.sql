SELECT r.id, r.events
FROM "flotilla".runs AS r
JOIN unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token) USING (id, token)
WHERE r.id = ANY (%(ids)s) AND r.state COLLATE "C" = 'running'
