DELETE FROM "flotilla".lock_waiters WHERE instance_id = ANY (%(dead)s::int[])
