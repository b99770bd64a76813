"""Notifications that runs are pending: one for all runs of a statement, never one for each run.

    runs:17:0:1767225600000000,18:5:1767225600250000,18::1767225600000000

means: runs of the action 17 are pending at priority 0, the earliest due at this instant (microseconds since 1970), runs
of the action 18 at priority 5, and ordered runs of the action 18. Each of these is a *queue*: the pending runs of an
action with one priority, or all pending ordered runs of an action. A notification may have 8,000 bytes, so very many
queues need several notifications. A lost notification delays runs and does no other harm.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The entry of a queue has at most 37 bytes.
QUEUES_PER_NOTIFICATION = 200

# The priority of a run's queue; null for the queue of the ordered runs.
QUEUE_PRIORITY = "CASE WHEN ordering_key IS NULL THEN priority END"


def notify_sql(pending: str) -> str:
    """Return the statement that notifies of these pending runs.

    `pending` is what follows FROM; it has `action_id`, `priority`, `ordering_key` and `run_at`.
    """
    return f"""
    SELECT pg_notify('{{channel}}', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, queue_priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8)
                   AS queue,
               row_number() OVER () / {QUEUES_PER_NOTIFICATION} AS page
        FROM (SELECT action_id, run_at, {QUEUE_PRIORITY} AS queue_priority FROM {pending}) AS q
        GROUP BY action_id, queue_priority
    ) AS p
    GROUP BY page
"""


def parse_notification(rest: str) -> Iterator[tuple[int, int | None, datetime]]:
    """Parse what follows `runs:`; yield the action, the priority (None: ordered runs), and when its runs are due."""
    instants: dict[str, datetime] = {}
    for queue in rest.split(","):
        action_id, priority, instant = queue.split(":")
        run_at = instants.get(instant)
        if run_at is None:
            run_at = instants[instant] = EPOCH + timedelta(microseconds=int(instant))
        yield int(action_id), int(priority) if priority else None, run_at
