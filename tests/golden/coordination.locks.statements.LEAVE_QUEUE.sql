DELETE FROM "flotilla".lock_waiters WHERE id = %(waiter)s RETURNING id
