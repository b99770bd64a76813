SET LOCAL lock_timeout TO DEFAULT
