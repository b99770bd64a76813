UPDATE "flotilla".breakers AS b
SET token = b.token + 1, probe_instance = %(me)s,
    probe_until = clock_timestamp() + make_interval(secs => %(probe_timeout)s::float8)
WHERE b.name = %(name)s AND b.open_until <= clock_timestamp()
  AND (
      b.probe_instance IS NULL OR b.probe_until <= clock_timestamp()
      OR EXISTS (SELECT FROM "flotilla".instances AS i WHERE i.id = b.probe_instance AND i.state = 'gone')
  )
RETURNING b.token
