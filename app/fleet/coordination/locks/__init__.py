"""Named locks: at most one task in the whole cluster holds a lock, each time with a new fencing token."""
