"""The floor everything stands on: one pool, direct sessions, tables, migrations, and the embedded PostgreSQL."""
