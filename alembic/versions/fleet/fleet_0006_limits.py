"""Limits and breakers that all instances share."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from alembic import op

revision = "fleet_0006"
down_revision = "fleet_0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "limits",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("used_until", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("name", name="limits_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "breakers",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False, server_default=sa.text("0")),
        sa.Column("failed_at", ARRAY(sa.DateTime(timezone=True)), nullable=False, server_default=sa.text("'{}'")),
        sa.Column("open_until", sa.DateTime(timezone=True)),
        sa.Column("openings", sa.Integer, nullable=False, server_default=sa.text("0")),
        sa.Column("probe_instance", sa.Integer),
        sa.Column("probe_until", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="breakers_pkey"),
        postgresql_with={"fillfactor": "50"},
    )


def downgrade() -> None:
    op.drop_table("breakers")
    op.drop_table("limits")
