"""Notifications that runs are pending: one for all runs of a statement, never one for each run.

    runs:17:0:1767225600000000,18:5:1767225600250000,18::1767225600000000

means: runs of the action 17 are pending at priority 0, the earliest due at this instant (microseconds since 1970), runs
of the action 18 at priority 5, and ordered runs of the action 18. Each of these is a *queue*: the pending runs of an
action with one priority, or all pending ordered runs of an action. A notification may have 8,000 bytes, so very many
queues need several notifications. A lost notification delays runs and does no other harm.

When an instance that leaves returns its runs, the notification says of which release it is:

    returned:1f8ac10f:17:0:1767225600000000

In a deploy, the other instances of that release leave soon too, and would return the runs again. So they let an
instance of another release claim first, if there is one (`engine/engine.py`).
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from hashlib import sha256

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The entry of a queue has at most 37 bytes.
QUEUES_PER_NOTIFICATION = 200

# The priority of a run's queue; null for the queue of the ordered runs.
QUEUE_PRIORITY = "CASE WHEN ordering_key IS NULL THEN priority END"
# What a notification begins with, unless its runs were returned.
WAITING_HEADING = "runs:"


def notify_sql(pending: str, heading: str = f"'{WAITING_HEADING}'") -> str:
    """Return the statement that notifies of these pending runs.

    `pending` is what follows FROM; it has `action_id`, `priority`, `ordering_key` and `run_at`. `heading` is what the
    notification begins with, in SQL.
    """
    return f"""
    SELECT pg_notify('{{channel}}', {heading} || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / {QUEUES_PER_NOTIFICATION} AS page
        FROM (SELECT action_id, run_at, {QUEUE_PRIORITY} AS queue_priority FROM {pending}) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page
"""


def release_mark(version: str) -> str:
    """A version may have any characters and any length; its mark has eight."""
    return sha256(version.encode()).hexdigest()[:8]


def returned_heading(version: str) -> str:
    return f"returned:{release_mark(version)}:"


def parse_notification(rest: str) -> Iterator[tuple[int, int | None, datetime]]:
    """Parse what follows the heading; yield action, priority (None: ordered runs), and when its runs are due."""
    instants: dict[str, datetime] = {}
    for queue in rest.split(","):
        action_id, priority, instant = queue.split(":")
        run_at = instants.get(instant)
        if run_at is None:
            run_at = instants[instant] = EPOCH + timedelta(microseconds=int(instant))
        yield int(action_id), int(priority) if priority else None, run_at
