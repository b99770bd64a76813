"""Actions: their declaration and schedule, their rows in the database, their administration."""
