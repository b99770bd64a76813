SELECT pg_advisory_unlock(hashtextextended('flotilla/migrate/flotilla', 0))
