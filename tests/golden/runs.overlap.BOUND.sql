SELECT set_config('idle_in_transaction_session_timeout', '5000', true),
       set_config('lock_timeout', '1000', true)
