UPDATE "flotilla".instances SET turn_pid = pg_backend_pid() WHERE id = %(id)s AND state <> 'gone'
