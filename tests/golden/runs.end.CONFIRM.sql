SELECT w.id
FROM unnest(%(ids)s::int8[], %(tokens)s::int8[]) AS w (id, token)
WHERE EXISTS (SELECT FROM "flotilla".finished_runs AS f WHERE f.id = w.id AND f.token = w.token)
   OR (%(returned)s AND EXISTS (
       SELECT FROM "flotilla".runs AS r WHERE r.id = w.id AND r.token = w.token AND r.state = 'pending'
   ))
