"""Cluster membership: the link that proves that an instance is live, the registry of instances, and the leader."""
