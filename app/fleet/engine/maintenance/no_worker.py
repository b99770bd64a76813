"""The anomaly `no_worker`: runs of an action are due, and no living instance would claim them.

Either only instances of role `web` have the action in their code, or none has it: every worker ended, or a deploy has
removed the action. The runs wait; nothing is lost. A paused action is not reported, and neither are runs that have been
due for less than `AFTER`, because a restart of the only worker takes some seconds.
"""

from collections.abc import Sequence
from datetime import timedelta

from app.fleet.cluster.anomalies import Anomaly
from app.fleet.cluster.registry import Instance
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.pool.pool import Connection
from app.fleet.runs.read.queues import QUEUES

AFTER = timedelta(seconds=10)

FIND_WITHOUT_WORKER = Statement(f"""
WITH RECURSIVE {QUEUES}, executable AS (
    SELECT unnest(s.action_ids) AS action_id
    FROM {{schema}}.standby AS s
    JOIN {{schema}}.instances AS i ON i.id = s.instance_id
    WHERE i.state IN ('starting', 'ready') AND i.role <> 'web'
)
SELECT a.name, min(q.run_at), EXISTS (
    SELECT FROM {{schema}}.standby AS s
    JOIN {{schema}}.instances AS i ON i.id = s.instance_id AND i.state <> 'gone' AND a.id = ANY (s.action_ids)
) AS known
FROM queues AS q
JOIN {{schema}}.actions AS a ON a.id = q.action_id
WHERE a.paused_at IS NULL AND q.run_at < clock_timestamp() - %(after)s
  AND a.id NOT IN (SELECT action_id FROM executable)
GROUP BY a.id
ORDER BY a.name
LIMIT 100
""")


async def check(connection: Connection, namespace: Namespace, _: Sequence[Instance]) -> list[Anomaly]:
    rows = await (await connection.execute(namespace.sql(FIND_WITHOUT_WORKER), {"after": AFTER})).fetchall()
    return [
        Anomaly(
            "no_worker",
            name,
            since,
            f"runs of {name} have been due since {since:%Y-%m-%d %H:%M:%S %Z}, and no living instance executes them: "
            + (
                "start an instance of role worker or all"
                if known
                else "no living release has this action in its code; deploy one that has it, or cancel the runs"
            ),
        )
        for name, since, known in rows
    ]
