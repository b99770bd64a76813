"""What notifications missed, what dead instances left, and what is old: the reconciler, the rescuer, the pruner."""
