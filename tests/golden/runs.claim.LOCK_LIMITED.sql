SELECT id FROM "flotilla".actions WHERE id = ANY (%(actions)s) ORDER BY id FOR NO KEY UPDATE SKIP LOCKED
