"""Telling everyone that runs wait: one notification for a whole statement's worth of them, and never one for each run.

    runs:17:0:1767225600000000,18:5:1767225600250000

says that runs of the action 17 wait at priority 0, from that instant on (microseconds since 1970), and of action 18 at
priority 5. A notification may have 8,000 bytes, so very many places take a few. Losing one makes something slower.
"""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Of at most 37 bytes each: an action's id, a priority, an instant, and what is between them.
PLACES = 200


def notify_sql(waiting: str) -> str:
    """Return the statement that tells of the rows of a CTE with `action_id`, `priority` and `run_at`."""
    return f"""
    SELECT pg_notify('{{channel}}', 'runs:' || string_agg(place, ','))
    FROM (
        SELECT format('%%s:%%s:%%s', action_id, priority, floor(extract(epoch FROM min(run_at)) * 1e6)::int8) AS place,
               row_number() OVER () / {PLACES} AS page
        FROM {waiting}
        GROUP BY action_id, priority
    ) AS p
    GROUP BY page
"""


def parse_notification(rest: str) -> Iterator[tuple[int, int, datetime]]:
    """Read what comes after `runs:`: actions, priorities, and from when on runs wait there."""
    instants: dict[str, datetime] = {}
    for place in rest.split(","):
        action_id, priority, instant = place.split(":")
        run_at = instants.get(instant)
        if run_at is None:
            run_at = instants[instant] = EPOCH + timedelta(microseconds=int(instant))
        yield int(action_id), int(priority), run_at
