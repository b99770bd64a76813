INSERT INTO "flotilla".run_keys AS k (action_id, key, run_id, digest)
VALUES (0, %(key)s, %(run)s, %(digest)s)
ON CONFLICT (action_id, key) DO UPDATE SET digest = k.digest
RETURNING digest
