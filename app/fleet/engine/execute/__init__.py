"""How an instance executes the runs that it has claimed, and writes what becomes of them."""
