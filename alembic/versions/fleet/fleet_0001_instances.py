"""The register of instances, and the queue for leadership."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import JSONB

from alembic import op

revision = "fleet_0001"
down_revision = None
branch_labels = ("fleet",)
depends_on = None


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("instance_ids", data_type=sa.Integer, maxvalue=2**28 - 1)))
    op.execute(sa.schema.CreateSequence(sa.Sequence("instance_numbers")))
    op.create_table(
        "instances",
        sa.Column("id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("run_id", sa.Uuid, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("hostname", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("port", sa.Integer),
        sa.Column("version", sa.Text, nullable=False),
        sa.Column("workspace", sa.Text),
        sa.Column("workspace_shared", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("connections", sa.Integer, nullable=False),
        sa.Column("running", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("heartbeat_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("server_started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("turn_pid", sa.Integer),
        sa.Column("drain_requested_at", sa.DateTime(timezone=True)),
        sa.Column("drain_reason", sa.Text),
        sa.Column("gone_at", sa.DateTime(timezone=True)),
        sa.Column("gone_reason", sa.Text),
        sa.Column("shutdown", JSONB),
        sa.PrimaryKeyConstraint("id", name="instances_pkey"),
        sa.CheckConstraint("state IN ('starting', 'ready', 'draining', 'gone')", name="instances_state_check"),
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
    # Candidates for leadership queue for a lock on it (app/fleet/cluster/leader.py). A view has no storage, so a lock
    # held for weeks does not block vacuum.
    op.execute("CREATE VIEW leader_turn AS SELECT 1 AS turn")


def downgrade() -> None:
    op.execute("DROP VIEW leader_turn")
    op.drop_table("instances")
    op.execute("DROP SEQUENCE instance_numbers")
    op.execute("DROP SEQUENCE instance_ids")
