INSERT INTO "flotilla".lock_releases (name, token, instance, holder, acquired_at, reason, released_by)
VALUES (%(name)s, %(token)s, %(instance)s, %(holder)s, %(acquired_at)s, %(reason)s, %(by)s)
