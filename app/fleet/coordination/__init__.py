"""What instances share beside runs: locks, limits, breakers, singletons."""
