SELECT digest FROM "flotilla".run_keys WHERE action_id = 0 AND key = %(mark)s
