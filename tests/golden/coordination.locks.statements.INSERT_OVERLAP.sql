INSERT INTO "flotilla".lock_overlaps (name, token, instance, other_token, other)
VALUES (%(name)s, %(token)s, %(instance)s, %(other_token)s, %(other)s)
