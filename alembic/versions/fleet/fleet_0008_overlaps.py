"""A record of every time that a lock had two holders."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0008"
down_revision = "fleet_0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "lock_overlaps",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("other_token", sa.BigInteger, nullable=False),
        sa.Column("other", sa.Text, nullable=False),
        sa.Column("found_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("clock_timestamp()")),
        sa.PrimaryKeyConstraint("id", name="lock_overlaps_pkey"),
    )


def downgrade() -> None:
    op.drop_table("lock_overlaps")
