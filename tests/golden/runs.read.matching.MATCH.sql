SELECT r.id
FROM "flotilla".runs AS r
WHERE r.id = ANY (%(ids)s::int8[])
  AND (%(state)s::text IS NULL OR r.state = %(state)s)
  AND (%(ordering_key)s::text IS NULL OR r.ordering_key = %(ordering_key)s)
  AND (%(words)s::text IS NULL OR strpos(lower(r.error), lower(%(words)s)) > 0)
UNION ALL
SELECT r.id
FROM "flotilla".finished_runs AS r
WHERE r.id = ANY (%(ids)s::int8[])
  AND (%(state)s::text IS NULL OR r.state = %(state)s)
  AND (%(ordering_key)s::text IS NULL OR r.ordering_key = %(ordering_key)s)
  AND (%(words)s::text IS NULL OR strpos(lower(r.error), lower(%(words)s)) > 0)
ORDER BY id DESC
