"""What becomes of runs, event by event, for clients and code that follow them."""
