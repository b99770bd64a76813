SELECT set_config('statement_timeout', %(limit)s, true)
