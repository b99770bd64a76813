"""Actions: how they are declared, scheduled, written to the database, and administrated."""
