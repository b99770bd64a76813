"""Reading runs: one, or a page of them."""
