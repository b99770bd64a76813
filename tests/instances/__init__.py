"""Several real processes, and what kills them."""
