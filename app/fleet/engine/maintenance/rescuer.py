"""The rescuer: takes runs over whose attempt has ended without a record. Most become pending again (`runs/requeue.py`).

    case                        when                                                      error of the run
    the instance is gone        in the transaction that declares it gone (`Rescue`). If   the instance died
                                it had `BATCH` runs or more, the rest follows in
                                transactions after that one
    the action hangs            its deadline and then `SLACK` seconds have passed, and    it exceeded its deadline
                                its own instance has not ended it: its event loop is
                                blocked, or only its link is left

From SIGKILL to the next attempt:

    1  the operating system closes the sockets, and PostgreSQL ends the link's session: the presence lock is free
    2  the leader's check, several times a second, finds a live row whose lock is free, and waits `GRACE`
       (`cluster/leader.py`). If the leader was killed, PostgreSQL first grants the leadership to the next instance
    3  `Registry.declare_gone`: one transaction takes the presence lock, sets the row to `gone`, and calls the hooks of
       the packages above; `Rescue` makes the runs pending, with a notification (RESCUE_ORPHANED)
    4  after the commit, the link of every instance receives `runs:…`, and the engine gives it to the backlog and wakes
       the dispatcher (`Engine._runs_wait`)
    5  an instance claims the run (CLAIM, with the next token), and its executor begins the attempt

If the notification is lost, the reconciler finds the queue within two seconds. If another transaction has locked the
instance's row in step 3, the leader ends the instance's pool sessions and tries again (`cluster/registry.py`).

The statements (`runs/requeue.py`) lock the rows FOR UPDATE and skip locked rows: a guarded transaction (`run.guard`)
has locked the row of its run, and the run is not rescued before that transaction ends. `sweep`, which the reconciler
calls, finds the skipped runs later, and runs of instances that are gone.

The death of an instance does not count against the retries of its runs. But a run that makes its process crash would
crash one instance after the other, so a run fails after `MAX_DEATHS` deaths.
"""

from collections.abc import Sequence
from typing import Any

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import BATCH, Instance, Session
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.runs.requeue import FIND_ORPHANED, RESCUE_ORPHANED, RESCUE_OVERDUE

# How long after its deadline a run is taken from an instance that is still live.
SLACK = 8.0
STUCK_AFTER = 60.0

FORGET_STANDBY = Statement("DELETE FROM {schema}.standby WHERE instance_id = ANY (%(dead)s)")

STUCK = Statement("""
SELECT r.id, a.name, r.instance, r.deadline_at
FROM {schema}.runs AS r
JOIN {schema}.actions AS a ON a.id = r.action_id
WHERE r.state = 'running' AND r.deadline_at < clock_timestamp() - make_interval(secs => %(slack)s)
ORDER BY r.deadline_at
LIMIT 100
""")


class Rescue:
    """Rescues the runs of an instance in the transaction that declares it gone (`registry.GoneHook`)."""

    def __init__(self, namespace: Namespace) -> None:
        self._sql = namespace.sql

    def __call__(self, session: Session, dead: Sequence[int]) -> bool:
        """Return whether there may be more runs."""
        session.execute(self._sql(FORGET_STANDBY), {"dead": list(dead)})
        row = session.execute(self._sql(RESCUE_ORPHANED), {"dead": list(dead)}).fetchone()
        return row is not None and row[0] == BATCH


async def sweep(connection: Connection, namespace: Namespace, *, slack: float = SLACK, overdue: bool = True) -> None:
    """Rescue the runs of instances that are gone, and, if `overdue`, runs that hang beyond their deadline."""
    values: dict[str, Any] = {"slack": slack}
    if overdue:
        await connection.execute(namespace.sql(RESCUE_OVERDUE), values)
    rows = await (await connection.execute(namespace.sql(FIND_ORPHANED))).fetchall()
    rescued = BATCH if rows else 0
    while rescued == BATCH:
        cursor = await connection.execute(namespace.sql(RESCUE_ORPHANED), {"dead": [row[0] for row in rows]})
        ((rescued, _),) = await cursor.fetchall()


async def stuck(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> list[Anomaly]:
    """Return the runs that should have been rescued long ago, as anomalies."""
    rows = await (await connection.execute(namespace.sql(STUCK), {"slack": STUCK_AFTER})).fetchall()
    return [
        Anomaly(
            "run_stuck",
            f"run {run_id}",
            deadline,
            f"{action} on {instance}: its deadline was {deadline:%Y-%m-%d %H:%M:%S %Z}, and no instance could take it "
            f"back; most often a transaction that the run guards is still open",
        )
        for run_id, action, instance, deadline in rows
    ]
