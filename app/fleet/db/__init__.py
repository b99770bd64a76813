"""The database: the pool, direct sessions, tables, migrations, and the embedded PostgreSQL."""
