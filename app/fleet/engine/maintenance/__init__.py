"""What notifications missed, what dead instances left, and what is old: the reconciler, the rescuer, the pruner.

`rescuer.py` tells the way of a run from the SIGKILL of its instance to its next attempt.
"""
