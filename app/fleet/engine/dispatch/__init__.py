"""How runs reach an instance: the scheduler inserts the due ones, the dispatcher claims the pending ones."""
