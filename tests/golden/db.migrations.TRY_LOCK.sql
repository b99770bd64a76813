SELECT pg_try_advisory_lock(hashtextextended('flotilla/migrate/flotilla', 0))
