"""One function or class at a time; no database."""
