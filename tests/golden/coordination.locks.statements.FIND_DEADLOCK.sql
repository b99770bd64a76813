WITH RECURSIVE chain AS (
    SELECT w.id, w.name, ARRAY[w.id] AS ids, ARRAY[%(name)s::text, w.name] AS names
    FROM "flotilla".lock_waiters AS w
    WHERE %(name)s = ANY (w.held)
    UNION ALL
    SELECT w.id, w.name, c.ids || w.id, c.names || w.name
    FROM chain AS c
    JOIN "flotilla".lock_waiters AS w ON c.name = ANY (w.held)
    WHERE w.id <> ALL (c.ids)
)
SELECT names
FROM chain
WHERE name = ANY (%(held)s::text[]) AND %(waiter)s >= ALL (ids)
LIMIT 1
