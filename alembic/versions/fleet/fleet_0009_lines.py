"""Ordered runs: runs of an action with the same ordering key execute one after another."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0009"
down_revision = "fleet_0008"
branch_labels = None
depends_on = None

# The stored priority of an ordered run is lower than its own by this offset.
APART = 10_000


def upgrade() -> None:
    op.add_column("runs", sa.Column("ordering_key", sa.Text(collation="C")))
    op.add_column("finished_runs", sa.Column("ordering_key", sa.Text(collation="C")))
    op.create_index(
        "runs_lines", "runs", ["action_id", "ordering_key", "id"], postgresql_where=sa.text("ordering_key IS NOT NULL")
    )
    op.create_index(
        "runs_lines_running",
        "runs",
        ["action_id", "ordering_key"],
        unique=True,
        postgresql_where=sa.text("state = 'running' AND ordering_key IS NOT NULL"),
    )


def downgrade() -> None:
    for table in ("runs", "finished_runs"):
        op.execute(f"UPDATE {table} SET priority = priority + {APART} WHERE ordering_key IS NOT NULL")
    op.drop_index("runs_lines_running", "runs")
    op.drop_index("runs_lines", "runs")
    op.drop_column("finished_runs", "ordering_key")
    op.drop_column("runs", "ordering_key")
