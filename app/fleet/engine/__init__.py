"""Actions become runs."""
