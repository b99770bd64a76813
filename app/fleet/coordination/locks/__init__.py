"""Locks with a name, held by one task in the whole cluster, each time with a new token."""
