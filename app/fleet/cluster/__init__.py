"""Who is there: the link that proves an instance alive, the registry of all of them, and the leader."""
