"""Where ordered runs wait: in a queue of their own for each action.

A run with an ordering key is stored with its priority less `ORDERED_OFFSET`, which no priority reaches. So a claim of
other runs never passes ordered runs in the index, however many of them wait for one key; and the notifications and
statements that tell of queues tell of ordered runs too. The given priority of an ordered run has no effect: ordered
runs are claimed at the priority of their action.
"""

# More than two priorities can differ by.
ORDERED_OFFSET = 10_000
# The queue of all ordered runs of an action.
ORDERED = -ORDERED_OFFSET


def stored_priority(priority: int, ordering_key: str | None) -> int:
    return priority if ordering_key is None else priority - ORDERED_OFFSET


def queue_priority(stored: int) -> int:
    """Return the priority of the queue in which a run with this stored priority waits."""
    return ORDERED if stored < ORDERED // 2 else stored
