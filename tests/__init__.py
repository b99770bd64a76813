"""The suite: unit, integration (one process, real PostgreSQL), instances (several real processes), deploy."""
