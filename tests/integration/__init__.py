"""One process and a real PostgreSQL."""
