"""The terms of leaders, and the clock offset of each instance."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0005"
down_revision = "fleet_0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("instances", sa.Column("clock_ahead", sa.Float))
    op.create_table(
        "leader_terms",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("instance_id", sa.Integer, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("began_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("clock_timestamp()")),
        sa.PrimaryKeyConstraint("id", name="leader_terms_pkey"),
    )
    op.create_index("leader_terms_began_at", "leader_terms", ["began_at"])


def downgrade() -> None:
    op.drop_table("leader_terms")
    op.drop_column("instances", "clock_ahead")
