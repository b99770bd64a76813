SELECT set_config('idle_in_transaction_session_timeout', '5000', true)
