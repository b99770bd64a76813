"""Pages of runs: an index for each filter."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0012"
down_revision = "fleet_0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("finished_runs_action_state", "finished_runs", ["action_id", "state", "id"])
    op.drop_index("finished_runs_action", "finished_runs")
    op.create_index("runs_pending_newest", "runs", ["action_id", "id"], postgresql_where=sa.text("state = 'pending'"))


def downgrade() -> None:
    op.drop_index("runs_pending_newest", "runs")
    op.create_index("finished_runs_action", "finished_runs", ["action_id", "id"])
    op.drop_index("finished_runs_action_state", "finished_runs")
