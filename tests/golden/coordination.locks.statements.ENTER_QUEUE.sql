WITH me AS MATERIALIZED (
    SELECT id FROM "flotilla".instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
)
INSERT INTO "flotilla".lock_waiters (name, instance_id, holder, ttl, held)
SELECT %(name)s, me.id, %(holder)s::text, %(ttl)s::interval, %(held)s::text[] FROM me
RETURNING id
