"""The life of a run: every statement that inserts one, or changes its state, and what is read of runs."""
