SELECT set_config('lock_timeout', %(patience)s, true)
