DELETE FROM "flotilla".standby WHERE instance_id = ANY (%(dead)s)
