INSERT INTO "flotilla".standby (instance_id, action_ids)
SELECT id, %(actions)s FROM "flotilla".instances WHERE id = %(me)s AND state <> 'gone' FOR KEY SHARE
ON CONFLICT (instance_id) DO UPDATE SET action_ids = excluded.action_ids
