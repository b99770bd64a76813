INSERT INTO "flotilla".leader_terms (instance_id, instance) VALUES (%(id)s, %(name)s)
