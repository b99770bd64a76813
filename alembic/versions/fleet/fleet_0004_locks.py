"""Locks, their waiters, and the releases by operators."""

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from alembic import op

revision = "fleet_0004"
down_revision = "fleet_0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "service_locks",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("instance_id", sa.Integer),
        sa.Column("instance", sa.Text),
        sa.Column("hostname", sa.Text),
        sa.Column("pid", sa.Integer),
        sa.Column("holder", sa.Text),
        sa.Column("waiter", sa.BigInteger),
        sa.Column("ttl", sa.Interval),
        sa.Column("acquired_at", sa.DateTime(timezone=True)),
        sa.Column("renewed_at", sa.DateTime(timezone=True)),
        sa.Column("expires_at", sa.DateTime(timezone=True)),
        sa.PrimaryKeyConstraint("name", name="service_locks_pkey"),
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "service_locks_held", "service_locks", ["instance_id"], postgresql_where=sa.text("instance_id IS NOT NULL")
    )
    op.create_table(
        "lock_waiters",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("instance_id", sa.Integer, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("ttl", sa.Interval, nullable=False),
        sa.Column("held", ARRAY(sa.Text), nullable=False),
        sa.PrimaryKeyConstraint("id", name="lock_waiters_pkey"),
    )
    op.create_index("lock_waiters_name", "lock_waiters", ["name", "id"])
    op.create_table(
        "lock_releases",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("instance", sa.Text, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("acquired_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("released_by", sa.Text, nullable=False),
        sa.Column(
            "released_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("clock_timestamp()")
        ),
        sa.PrimaryKeyConstraint("id", name="lock_releases_pkey"),
    )


def downgrade() -> None:
    op.drop_table("lock_releases")
    op.drop_table("lock_waiters")
    op.drop_table("service_locks")
