SELECT id FROM "flotilla".runs WHERE state = 'pending' AND id <> %(id)s FOR UPDATE SKIP LOCKED
