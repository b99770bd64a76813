"""A constraint: `run_at` is within the range that Python can read."""

from alembic import op

revision = "fleet_0010"
down_revision = "fleet_0009"
branch_labels = None
depends_on = None

LATEST = "9999-01-01 00:00:00+00"


def upgrade() -> None:
    op.execute(f"UPDATE runs SET run_at = '{LATEST}' WHERE run_at > '{LATEST}'")
    op.create_check_constraint("runs_run_at_check", "runs", f"run_at BETWEEN '1970-01-01 00:00:00+00' AND '{LATEST}'")


def downgrade() -> None:
    op.drop_constraint("runs_run_at_check", "runs")
