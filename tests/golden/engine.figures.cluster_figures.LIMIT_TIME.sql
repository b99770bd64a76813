SELECT set_config('statement_timeout', '1000', true)
