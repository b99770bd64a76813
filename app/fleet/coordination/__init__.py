"""Coordination between instances, apart from runs: locks, limits, breakers, singletons."""
