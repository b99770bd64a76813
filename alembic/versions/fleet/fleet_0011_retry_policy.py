"""The retry delays of actions, for all instances that return a run to pending."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0011"
down_revision = "fleet_0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # The defaults of the options: a release that does not know the columns leaves them at these values.
    op.add_column("actions", sa.Column("retry_delay", sa.Float, nullable=False, server_default=sa.text("1")))
    op.add_column("actions", sa.Column("max_retry_delay", sa.Float, nullable=False, server_default=sa.text("600")))


def downgrade() -> None:
    op.drop_column("actions", "max_retry_delay")
    op.drop_column("actions", "retry_delay")
