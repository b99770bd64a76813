"""Keys that are processed once."""

import sqlalchemy as sa

from alembic import op

revision = "fleet_0007"
down_revision = "fleet_0006"
branch_labels = None
depends_on = None

INSTANT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.execute(sa.schema.CreateSequence(sa.Sequence("once_tokens")))
    op.create_table(
        "once_keys",
        sa.Column("scope", sa.Text(collation="C"), nullable=False),
        sa.Column("key", sa.Text(collation="C"), nullable=False),
        sa.Column("token", sa.BigInteger, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("instance_id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.BigInteger),
        sa.Column("run_token", sa.BigInteger),
        sa.Column("taken_at", INSTANT, nullable=False),
        sa.Column("expires_at", INSTANT),
        sa.PrimaryKeyConstraint("scope", "key", name="once_keys_pkey"),
        sa.CheckConstraint("state IN ('pending', 'seen', 'free')", name="once_keys_state_check"),
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.05"},
    )
    op.create_index("once_keys_pending", "once_keys", ["taken_at"], postgresql_where=sa.text("state = 'pending'"))
    op.create_index("once_keys_expiry", "once_keys", ["expires_at"], postgresql_where=sa.text("state <> 'pending'"))


def downgrade() -> None:
    op.drop_table("once_keys")
    op.execute("DROP SEQUENCE once_tokens")
