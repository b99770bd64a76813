"""Actions, runs and the events of runs."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from alembic import op

revision = "fleet_0002"
down_revision = "fleet_0001"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "actions",
        sa.Column("id", sa.Integer, sa.Identity(maxvalue=2**28 - 1), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("schedule", sa.Text),
        sa.Column("misfire", sa.Text, nullable=False),
        sa.Column("overlap", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("retention", sa.Interval, nullable=False),
        sa.Column("concurrency", sa.Integer),
        sa.Column("rate_interval", sa.Float),
        sa.Column("rate_burst", sa.Integer),
        sa.Column("rate_used_until", INSTANT),
        sa.Column("next_run_at", INSTANT),
        sa.Column("paused_at", INSTANT),
        sa.Column("created_at", INSTANT, nullable=False, server_default=sa.text("now()")),
        sa.PrimaryKeyConstraint("id", name="actions_pkey"),
        sa.UniqueConstraint("name", name="actions_name_key"),
        sa.CheckConstraint("misfire IN ('once', 'all', 'skip')", name="actions_misfire_check"),
        sa.CheckConstraint("overlap IN ('skip', 'queue', 'allow')", name="actions_overlap_check"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "standby",
        sa.Column("instance_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("action_ids", ARRAY(sa.Integer), nullable=False),
        sa.PrimaryKeyConstraint("instance_id", name="standby_pkey"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("action_id", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default=sa.text("'pending'")),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("run_at", INSTANT, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("instance_id", sa.Integer),
        sa.Column("instance", sa.Text),
        sa.Column("attempt", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("deaths", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("scheduled_for", INSTANT),
        sa.Column("key", sa.Text),
        sa.Column("payload", sa.JSON),
        sa.Column("checkpoint", sa.JSON),
        sa.Column("progress", sa.JSON),
        sa.Column("error", sa.Text),
        sa.Column("events", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("cancel_requested_at", INSTANT),
        sa.Column("created_at", INSTANT, nullable=False, server_default=sa.text("now()")),
        sa.Column("started_at", INSTANT),
        sa.Column("deadline_at", INSTANT),
        sa.PrimaryKeyConstraint("id", name="runs_pkey"),
        sa.CheckConstraint("state IN ('pending', 'running')", name="runs_state_check"),
        postgresql_with={
            "fillfactor": "70",
            "autovacuum_vacuum_scale_factor": "0",
            "autovacuum_vacuum_threshold": "20000",
            "autovacuum_vacuum_cost_delay": "0",
            "autovacuum_analyze_scale_factor": "0.5",
        },
    )
    op.create_index(
        "runs_pending",
        "runs",
        ["action_id", "priority", "run_at", "id"],
        postgresql_where=sa.text("state = 'pending'"),
    )
    op.create_index("runs_running", "runs", ["action_id", "instance_id"], postgresql_where=sa.text("state = 'running'"))
    op.create_table(
        "finished_runs",
        sa.Column("id", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("action_id", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("run_at", INSTANT, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("instance", sa.Text),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("max_attempts", sa.Integer, nullable=False),
        sa.Column("trigger", sa.Text, nullable=False),
        sa.Column("scheduled_for", INSTANT),
        sa.Column("key", sa.Text),
        sa.Column("payload", sa.JSON),
        sa.Column("checkpoint", sa.JSON),
        sa.Column("progress", sa.JSON),
        sa.Column("result", sa.JSON),
        sa.Column("error", sa.Text),
        sa.Column("events", sa.Integer, nullable=False),
        sa.Column("created_at", INSTANT, nullable=False),
        sa.Column("started_at", INSTANT),
        sa.Column("finished_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT, nullable=False),
        sa.PrimaryKeyConstraint("id", name="finished_runs_pkey"),
        sa.CheckConstraint("state IN ('succeeded', 'failed', 'cancelled')", name="finished_runs_state_check"),
    )
    op.create_index("finished_runs_action", "finished_runs", ["action_id", "id"])
    op.create_index("finished_runs_expiry", "finished_runs", ["expires_at"])
    op.create_index(
        "finished_runs_unwell", "finished_runs", ["state", "id"], postgresql_where=sa.text("state <> 'succeeded'")
    )
    op.create_table(
        "run_keys",
        sa.Column("action_id", sa.Integer, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("run_id", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.Text),
        sa.PrimaryKeyConstraint("action_id", "key", name="run_keys_pkey"),
    )
    op.create_index("run_keys_run_id", "run_keys", ["run_id"])
    op.create_table(
        "run_events",
        sa.Column("run_id", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.Integer, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("data", sa.JSON),
        sa.Column("at", INSTANT, nullable=False, server_default=sa.text("clock_timestamp()")),
        sa.PrimaryKeyConstraint("run_id", "seq", name="run_events_pkey"),
    )


def downgrade() -> None:
    for table in ("run_events", "run_keys", "finished_runs", "runs", "standby", "actions"):
        op.drop_table(table)
