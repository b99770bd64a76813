SELECT set_config('lock_timeout', '1000', true)
