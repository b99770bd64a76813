"""The schema of the fleet: instances, runs, events, coordination and the seen-store.

Comments on columns are in `app/fleet/db/schema/`.
"""

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

from alembic import op

revision = "fleet_0001"
down_revision = None
branch_labels = ("fleet",)
depends_on = None

TABLES = (
    "instances",
    "actions",
    "runs",
    "finished_runs",
    "run_keys",
    "run_events",
    "run_tracebacks",
    "feed",
    "feed_settings",
    "standby",
    "run_minutes",
    "service_locks",
    "lock_waiters",
    "lock_releases",
    "lock_overlaps",
    "leader_terms",
    "limits",
    "breakers",
    "once_keys",
)

# As PostgreSQL prints it, because the model is compared with the database.
ALIKE = r"""
CASE WHEN state = 'failed'::text THEN hashtextextended(
    regexp_replace(
        left(COALESCE(error, ''::text), 500) COLLATE "C", '"[^"]*"|(?<!\w)''[^'']*''|\S*[0-9@]\S*'::text,
        '#'::text, 'g'::text
    ), 0::bigint
) ELSE NULL::bigint END
"""

# The runs that an instance with a free slot could claim now, for each action that is neither paused nor without a
# worker. Not among them: runs that are due later, runs behind the first unfinished run of their ordering key, and runs
# beyond the `concurrency` of their action. At most 100,000 runs of a priority and 10,000 ordering keys of an action are
# counted.
RUNNABLE_RUNS = """
CREATE VIEW runnable_runs AS
WITH RECURSIVE claimable AS MATERIALIZED (
    SELECT a.id, a.name, a.concurrency
    FROM actions AS a
    WHERE a.paused_at IS NULL AND a.id IN (
        SELECT unnest(s.action_ids)
        FROM standby AS s
        JOIN instances AS i ON i.id = s.instance_id AND i.state = 'ready' AND i.role <> 'web'
    )
), queues AS (
    (
        SELECT action_id, priority, run_at
        FROM runs
        WHERE state = 'pending' AND ordering_key IS NULL
        ORDER BY action_id, priority, run_at
        LIMIT 1
    )
    UNION ALL
    SELECT n.*
    FROM queues AS q, LATERAL (
        SELECT action_id, priority, run_at
        FROM runs
        WHERE state = 'pending' AND ordering_key IS NULL AND (action_id, priority) > (q.action_id, q.priority)
        ORDER BY action_id, priority, run_at
        LIMIT 1
    ) AS n
), due AS (
    SELECT q.action_id, q.run_at AS oldest, n.runs
    FROM queues AS q
    JOIN claimable AS c ON c.id = q.action_id, LATERAL (
        SELECT count(*) AS runs
        FROM (
            SELECT
            FROM runs
            WHERE state = 'pending' AND ordering_key IS NULL AND action_id = q.action_id AND priority = q.priority
              AND run_at <= statement_timestamp()
            LIMIT 100000
        ) AS r
    ) AS n
    WHERE q.run_at <= statement_timestamp()
    UNION ALL
    SELECT c.id, n.oldest, n.runs
    FROM claimable AS c, LATERAL (
        WITH RECURSIVE heads AS (
            (
                SELECT ordering_key, state, run_at, 1 AS number
                FROM runs
                WHERE action_id = c.id AND ordering_key IS NOT NULL
                ORDER BY ordering_key, id
                LIMIT 1
            )
            UNION ALL
            SELECT f.*, h.number + 1
            FROM heads AS h, LATERAL (
                SELECT ordering_key, state, run_at
                FROM runs
                WHERE action_id = c.id AND ordering_key > h.ordering_key
                ORDER BY ordering_key, id
                LIMIT 1
            ) AS f
            WHERE h.number < 10000
        )
        SELECT count(*) AS runs, min(run_at) AS oldest
        FROM heads
        WHERE state = 'pending' AND run_at <= statement_timestamp()
    ) AS n
    WHERE n.runs > 0
), total AS (
    SELECT action_id, sum(runs)::int8 AS runs, min(oldest) AS oldest FROM due GROUP BY action_id
), allowed AS (
    SELECT c.id AS action_id, c.name, t.oldest, CASE
        WHEN t.runs IS NULL THEN 0
        WHEN c.concurrency IS NULL THEN t.runs
        ELSE least(t.runs, greatest(0, c.concurrency - (
            SELECT count(*) FROM runs AS r WHERE r.action_id = c.id AND r.state = 'running'
        )))
    END AS runs
    FROM claimable AS c
    LEFT JOIN total AS t ON t.action_id = c.id
)
SELECT action_id, name, runs,
       CASE WHEN runs > 0 THEN extract(epoch FROM statement_timestamp() - oldest)::float8 ELSE 0 END AS oldest_seconds
FROM allowed
"""

# How much work there is, for an autoscaler: one row. `backlog_seconds` is how long one worker would need for the
# runnable runs, with all its slots; a run is expected to take as long as the last hundred of its action, or a second.
# `busy_workers` is how many workers the running runs fill.
WORKER_BACKLOG = """
CREATE VIEW worker_backlog AS
WITH workers AS (
    SELECT count(*) FILTER (WHERE state = 'ready') AS ready,
           coalesce(avg(concurrency) FILTER (WHERE state = 'ready'), avg(concurrency), 100)::float8 AS slots
    FROM instances
    WHERE role <> 'web'
), work AS (
    SELECT coalesce(sum(r.runs), 0)::int8 AS runs, coalesce(sum(r.runs * coalesce(d.seconds, 1)), 0)::float8 AS seconds
    FROM runnable_runs AS r, LATERAL (
        SELECT avg(extract(epoch FROM f.finished_at - f.started_at))::float8 AS seconds
        FROM (
            SELECT finished_at, started_at
            FROM finished_runs
            WHERE action_id = r.action_id AND state = 'succeeded'
            ORDER BY action_id DESC, state DESC, id DESC
            LIMIT 100
        ) AS f
    ) AS d
    WHERE r.runs > 0
)
SELECT w.runs AS runnable_runs, w.seconds / k.slots AS backlog_seconds,
       (SELECT count(*) FROM runs WHERE state = 'running') / k.slots AS busy_workers, k.ready AS ready_workers
FROM work AS w, workers AS k
"""


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("instance_ids", data_type=sa.Integer, maxvalue=2**28 - 1)))
    op.execute(sa.schema.CreateSequence(sa.Sequence("instance_numbers")))
    op.execute(sa.schema.CreateSequence(sa.Sequence("once_tokens")))
    # The instances queue for a lock on this view; the holder is the leader.
    op.execute("CREATE VIEW leader_turn AS SELECT 1 AS turn")
    op.create_table(
        "instances",
        sa.Column("id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Uuid(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("role", sa.Text(), server_default="all", nullable=False),
        sa.Column("hostname", sa.Text(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("port", sa.Integer()),
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("workspace", sa.Text()),
        sa.Column("workspace_shared", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.Column("connections", sa.Integer(), nullable=False),
        sa.Column("concurrency", sa.Integer(), server_default=sa.text("100"), nullable=False),
        sa.Column("running", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("server_started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("turn_pid", sa.Integer()),
        sa.Column("clock_ahead", sa.Float()),
        sa.Column("connection_out_seconds", sa.Float()),
        sa.Column("drain_requested_at", sa.DateTime(timezone=True)),
        sa.Column("drain_reason", sa.Text()),
        sa.Column("gone_at", sa.DateTime(timezone=True)),
        sa.Column("gone_reason", sa.Text()),
        sa.Column("shutdown", JSONB()),
        sa.CheckConstraint("state IN ('starting', 'ready', 'draining', 'gone')", name="instances_state_check"),
        sa.CheckConstraint("role IN ('all', 'web', 'worker')", name="instances_role_check"),
        sa.PrimaryKeyConstraint("id", name="instances_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "instances_name_living", "instances", ["name"], unique=True, postgresql_where=sa.text("state <> 'gone'")
    )
    op.create_index(
        "instances_workspace_living",
        "instances",
        ["workspace"],
        unique=True,
        postgresql_where=sa.text("state <> 'gone' AND NOT workspace_shared"),
    )
    op.create_table(
        "actions",
        sa.Column("id", sa.Integer(), sa.Identity(always=False, maxvalue=268435455), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("schedule", sa.Text()),
        sa.Column("misfire", sa.Text(), nullable=False),
        sa.Column("overlap", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("retention", sa.Interval(), nullable=False),
        sa.Column("concurrency", sa.Integer()),
        sa.Column("rate_interval", sa.Float()),
        sa.Column("rate_burst", sa.Integer()),
        sa.Column("rate_used_until", sa.DateTime(timezone=True)),
        sa.Column("next_run_at", sa.DateTime(timezone=True)),
        sa.Column("paused_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("retry_delay", sa.Float(), server_default=sa.text("1"), nullable=False),
        sa.Column("max_retry_delay", sa.Float(), server_default=sa.text("600"), nullable=False),
        sa.CheckConstraint("misfire IN ('once', 'all', 'skip')", name="actions_misfire_check"),
        sa.CheckConstraint("overlap IN ('skip', 'queue', 'allow')", name="actions_overlap_check"),
        sa.PrimaryKeyConstraint("id", name="actions_pkey"),
        sa.UniqueConstraint("name", name="actions_name_key"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("action_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), server_default=sa.text("'pending'"), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("run_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("token", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("instance_id", sa.Integer()),
        sa.Column("instance", sa.Text()),
        sa.Column("attempt", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("deaths", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("scheduled_for", sa.DateTime(timezone=True)),
        sa.Column("key", sa.Text()),
        sa.Column("ordering_key", sa.Text(collation="C")),
        sa.Column("payload", sa.JSON()),
        sa.Column("checkpoint", sa.JSON()),
        sa.Column("progress", sa.JSON()),
        sa.Column("error", sa.Text()),
        sa.Column("events", sa.Integer(), server_default=sa.text("1"), nullable=False),
        sa.Column("running_seq", sa.Integer()),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True)),
        sa.Column("created_at", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("deadline_at", sa.DateTime(timezone=True)),
        sa.Column("triggered_by", sa.BigInteger()),
        sa.Column("request_id", sa.Text()),
        sa.Column("trace_parent", sa.Text()),
        sa.CheckConstraint(
            "run_at BETWEEN '1970-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00'", name="runs_run_at_check"
        ),
        sa.CheckConstraint("state IN ('pending', 'running')", name="runs_state_check"),
        sa.PrimaryKeyConstraint("id", name="runs_pkey"),
        postgresql_with={
            "fillfactor": "70",
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "20000",
            "autovacuum_vacuum_cost_delay": "0",
            "autovacuum_analyze_scale_factor": "0.5",
        },
    )
    op.create_index(
        "runs_triggered_by", "runs", ["triggered_by", "id"], postgresql_where=sa.text("triggered_by IS NOT NULL")
    )
    # In this order: of two indexes that cost the same, the planner takes the newer one (`runs_ordered_running`).
    op.create_index(
        "runs_pending",
        "runs",
        ["action_id", "priority", "run_at", "id"],
        postgresql_where=sa.text("state = 'pending' AND ordering_key IS NULL"),
    )
    op.create_index(
        "runs_ordered_pending",
        "runs",
        ["action_id", "run_at"],
        postgresql_where=sa.text("state = 'pending' AND ordering_key IS NOT NULL"),
    )
    op.create_index(
        "runs_running",
        "runs",
        ["action_id", "instance_id"],
        postgresql_where=sa.text("state = 'running'"),
    )
    op.create_index(
        "runs_ordered",
        "runs",
        ["action_id", "ordering_key", "id"],
        postgresql_where=sa.text("ordering_key IS NOT NULL"),
    )
    op.create_index(
        "runs_ordered_running",
        "runs",
        ["action_id", "ordering_key"],
        unique=True,
        postgresql_where=sa.text("state = 'running' AND ordering_key IS NOT NULL"),
    )
    op.create_index("runs_pending_newest", "runs", ["action_id", "id"], postgresql_where=sa.text("state = 'pending'"))
    op.create_table(
        "finished_runs",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("action_id", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("run_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("instance", sa.Text()),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("max_attempts", sa.Integer(), nullable=False),
        sa.Column("trigger", sa.Text(), nullable=False),
        sa.Column("scheduled_for", sa.DateTime(timezone=True)),
        sa.Column("key", sa.Text()),
        sa.Column("ordering_key", sa.Text(collation="C")),
        sa.Column("payload", sa.JSON()),
        sa.Column("checkpoint", sa.JSON()),
        sa.Column("progress", sa.JSON()),
        sa.Column("result", sa.JSON()),
        sa.Column("error", sa.Text()),
        sa.Column("events", sa.Integer(), nullable=False),
        sa.Column("running_seq", sa.Integer()),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True)),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("triggered_by", sa.BigInteger()),
        sa.Column("request_id", sa.Text()),
        sa.Column("trace_parent", sa.Text()),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("alike", sa.BigInteger(), sa.Computed(ALIKE, persisted=True)),
        sa.CheckConstraint("state IN ('succeeded', 'failed', 'cancelled')", name="finished_runs_state_check"),
        sa.PrimaryKeyConstraint("id", name="finished_runs_pkey"),
    )
    op.create_index(
        "finished_runs_triggered_by",
        "finished_runs",
        ["triggered_by", "id"],
        postgresql_where=sa.text("triggered_by IS NOT NULL"),
    )
    op.create_index("finished_runs_expiry", "finished_runs", ["expires_at"])
    op.create_index(
        "finished_runs_unwell",
        "finished_runs",
        ["state", "id"],
        postgresql_where=sa.text("state <> 'succeeded'"),
    )
    op.create_index("finished_runs_action_state", "finished_runs", ["action_id", "state", "id"])
    op.create_index(
        "finished_runs_alike",
        "finished_runs",
        ["action_id", "alike", "id"],
        postgresql_where=sa.text("alike IS NOT NULL"),
    )
    op.create_table(
        "run_keys",
        sa.Column("action_id", sa.Integer(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("digest", sa.Text()),
        sa.PrimaryKeyConstraint("action_id", "key", name="run_keys_pkey"),
    )
    op.create_index("run_keys_run_id", "run_keys", ["run_id"])
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON()),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "seq", name="run_events_pkey"),
    )
    op.create_table(
        "run_tracebacks",
        sa.Column("run_id", sa.BigInteger(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("instance", sa.Text()),
        sa.Column("error", sa.Text(), nullable=False),
        sa.Column("traceback", sa.Text(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("run_id", "token", name="run_tracebacks_pkey"),
    )
    op.create_table(
        "feed",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("first", sa.BigInteger()),
        sa.Column("at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("instance", sa.Text()),
        sa.Column("many", sa.Integer(), nullable=False),
        sa.Column("runs", ARRAY(sa.BigInteger()), nullable=False),
        sa.Column("actions", ARRAY(sa.Integer()), nullable=False),
        sa.Column("seqs", ARRAY(sa.Integer()), nullable=False),
        sa.Column("attempts", ARRAY(sa.Integer()), nullable=False),
        sa.PrimaryKeyConstraint("id", name="feed_pkey"),
    )
    op.create_index("feed_first", "feed", ["first"], unique=True, postgresql_where=sa.text("first IS NOT NULL"))
    op.create_index("feed_new", "feed", ["id"], postgresql_where=sa.text("first IS NULL"))
    # Not compressed: rows are written often, read once or twice, and deleted soon.
    for column in ("runs", "actions", "seqs", "attempts"):
        op.execute(f"ALTER TABLE feed ALTER COLUMN {column} SET STORAGE EXTERNAL")
    settings = op.create_table("feed_settings", sa.Column("kept", sa.Interval(), nullable=False))
    op.bulk_insert(settings, [{"kept": timedelta(minutes=10)}])
    op.create_table(
        "standby",
        sa.Column("instance_id", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("action_ids", ARRAY(sa.Integer()), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", name="standby_pkey"),
    )
    op.create_table(
        "run_minutes",
        sa.Column("minute", sa.DateTime(timezone=True), nullable=False),
        sa.Column("action_id", sa.Integer(), nullable=False),
        sa.Column("succeeded", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("failed", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("cancelled", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("retried", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("paused", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("work_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("begun", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("waited_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("longest_wait_seconds", sa.Float(), server_default=sa.text("0"), nullable=False),
        sa.Column("waiting", sa.BigInteger()),
        sa.Column("oldest_seconds", sa.Float()),
        sa.PrimaryKeyConstraint("minute", "action_id", name="run_minutes_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "service_locks",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("instance_id", sa.Integer()),
        sa.Column("instance", sa.Text()),
        sa.Column("hostname", sa.Text()),
        sa.Column("pid", sa.Integer()),
        sa.Column("holder", sa.Text()),
        sa.Column("waiter", sa.BigInteger()),
        sa.Column("ttl", sa.Interval()),
        sa.Column("acquired_at", sa.DateTime(timezone=True)),
        sa.Column("renewed_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="service_locks_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "service_locks_held",
        "service_locks",
        ["instance_id"],
        postgresql_where=sa.text("instance_id IS NOT NULL"),
    )
    op.create_table(
        "lock_waiters",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Integer(), nullable=False),
        sa.Column("holder", sa.Text()),
        sa.Column("ttl", sa.Interval(), nullable=False),
        sa.Column("held", ARRAY(sa.Text()), nullable=False),
        sa.PrimaryKeyConstraint("id", name="lock_waiters_pkey"),
    )
    op.create_index("lock_waiters_name", "lock_waiters", ["name", "id"])
    op.create_table(
        "lock_releases",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("holder", sa.Text()),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("released_by", sa.Text(), nullable=False),
        sa.Column(
            "released_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False
        ),
        sa.PrimaryKeyConstraint("id", name="lock_releases_pkey"),
    )
    op.create_table(
        "lock_overlaps",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("other_token", sa.BigInteger(), nullable=False),
        sa.Column("other", sa.Text(), nullable=False),
        sa.Column("found_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="lock_overlaps_pkey"),
    )
    op.create_table(
        "leader_terms",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), nullable=False),
        sa.Column("instance_id", sa.Integer(), nullable=False),
        sa.Column("instance", sa.Text(), nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), server_default=sa.text("clock_timestamp()"), nullable=False),
        sa.PrimaryKeyConstraint("id", name="leader_terms_pkey"),
    )
    op.create_index("leader_terms_began_at", "leader_terms", ["began_at"])
    op.create_table(
        "limits",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("used_until", sa.DateTime(timezone=True), nullable=False),
        sa.Column("rate_interval", sa.Float()),
        sa.Column("rate_burst", sa.Integer()),
        sa.PrimaryKeyConstraint("name", name="limits_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "breakers",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), server_default=sa.text("0"), nullable=False),
        sa.Column("failed_at", ARRAY(sa.DateTime(timezone=True)), server_default=sa.text("'{}'"), nullable=False),
        sa.Column("open_until", sa.DateTime(timezone=True)),
        sa.Column("openings", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("probe_instance", sa.Integer()),
        sa.Column("probe_until", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="breakers_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "once_keys",
        sa.Column("scope", sa.Text(collation="C"), nullable=False),
        sa.Column("key", sa.Text(collation="C"), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("instance_id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.BigInteger()),
        sa.Column("run_token", sa.BigInteger()),
        sa.Column("taken_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint("state IN ('pending', 'seen', 'free')", name="once_keys_state_check"),
        sa.PrimaryKeyConstraint("scope", "key", name="once_keys_pkey"),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.05"},
    )
    op.create_index("once_keys_expiry", "once_keys", ["expires_at"], postgresql_where=sa.text("state <> 'pending'"))
    op.create_index("once_keys_pending", "once_keys", ["taken_at"], postgresql_where=sa.text("state = 'pending'"))
    op.execute(RUNNABLE_RUNS)
    op.execute(WORKER_BACKLOG)


def downgrade() -> None:
    op.execute("DROP VIEW worker_backlog, runnable_runs")
    for table in reversed(TABLES):
        op.drop_table(table)
    op.execute("DROP VIEW leader_turn")
    for sequence in ("once_tokens", "instance_numbers", "instance_ids"):
        op.execute(f"DROP SEQUENCE {sequence}")
