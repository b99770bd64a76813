"""Notifications that runs are pending: one for all runs of a statement, never one for each run.

    runs:17:0:1767225600000000,18:5:1767225600250000

means: runs of the action 17 are pending at priority 0, the earliest due at this instant (microseconds since 1970), and
runs of the action 18 at priority 5. A pair of action and priority is a *queue*. A notification may have 8,000 bytes, so
very many queues need several notifications. A lost notification delays runs and does no other harm.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# The entry of a queue has at most 37 bytes.
QUEUES_PER_NOTIFICATION = 200


def notify_sql(pending: str) -> str:
    """Return the statement that notifies of the runs in a CTE with `action_id`, `priority` and `run_at`."""
    return f"""
    SELECT pg_notify('{{channel}}', 'runs:' || string_agg(queue, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8) AS queue,
               row_number() OVER () / {QUEUES_PER_NOTIFICATION} AS page
        FROM {pending}
        GROUP BY action_id, priority
    ) AS p
    GROUP BY page
"""


def parse_notification(rest: str) -> Iterator[tuple[int, int, datetime]]:
    """Parse what follows `runs:`; yield action, priority, and the instant from which on runs are due."""
    instants: dict[str, datetime] = {}
    for queue in rest.split(","):
        action_id, priority, instant = queue.split(":")
        run_at = instants.get(instant)
        if run_at is None:
            run_at = instants[instant] = EPOCH + timedelta(microseconds=int(instant))
        yield int(action_id), int(priority), run_at
