"""How long a connection has been missing from an instance's pool, if that is longer than a transaction may last."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0013"
down_revision = "fleet_0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("connection_out_seconds", sa.Float))


def downgrade() -> None:
    op.drop_column("instances", "connection_out_seconds")
