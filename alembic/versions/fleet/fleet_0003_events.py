"""State changes are numbered events of a run; the feed has the state changes of all runs.

Existing runs get events for their creation, start and end, numbered before the events that they have emitted.
"""

from datetime import timedelta

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from alembic import op

revision = "fleet_0003"
down_revision = "fleet_0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("running_seq", sa.Integer))
    op.add_column("finished_runs", sa.Column("running_seq", sa.Integer))
    op.alter_column("runs", "events", server_default=sa.text("1"))
    op.execute("UPDATE run_events SET seq = -(seq + 2)")
    op.execute("UPDATE run_events SET seq = -seq")
    op.execute("""
        UPDATE runs
        SET events = events + CASE WHEN started_at IS NULL THEN 1 ELSE 2 END,
            running_seq = CASE WHEN started_at IS NOT NULL THEN 2 END
    """)
    op.execute("""
        UPDATE finished_runs
        SET events = events + CASE WHEN started_at IS NULL THEN 2 ELSE 3 END,
            running_seq = CASE WHEN started_at IS NOT NULL THEN 2 END
    """)
    op.execute("""
        INSERT INTO run_events (run_id, seq, kind, data, at)
        SELECT id, 2, 'state', json_build_object('state', 'running', 'attempt', attempt, 'instance', instance),
               started_at
        FROM runs
        WHERE state = 'pending' AND started_at IS NOT NULL
    """)

    op.create_table(
        "feed",
        sa.Column("id", sa.BigInteger, sa.Identity(), nullable=False),
        sa.Column("first", sa.BigInteger),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("clock_timestamp()")),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("instance", sa.Text),
        sa.Column("many", sa.Integer, nullable=False),
        sa.Column("runs", ARRAY(sa.BigInteger), nullable=False),
        sa.Column("actions", ARRAY(sa.Integer), nullable=False),
        sa.Column("seqs", ARRAY(sa.Integer), nullable=False),
        sa.Column("attempts", ARRAY(sa.Integer), nullable=False),
        sa.PrimaryKeyConstraint("id", name="feed_pkey"),
    )
    op.create_index("feed_first", "feed", ["first"], unique=True, postgresql_where=sa.text("first IS NOT NULL"))
    op.create_index("feed_new", "feed", ["id"], postgresql_where=sa.text("first IS NULL"))
    # Not compressed: written often, read once or twice, and deleted soon.
    for column in ("runs", "actions", "seqs", "attempts"):
        op.execute(f"ALTER TABLE feed ALTER COLUMN {column} SET STORAGE EXTERNAL")
    settings = op.create_table(
        "feed_settings",
        sa.Column("kept", sa.Interval, nullable=False),
    )
    op.bulk_insert(settings, [{"kept": timedelta(minutes=10)}])


def downgrade() -> None:
    op.drop_table("feed_settings")
    op.drop_table("feed")
    op.execute("DELETE FROM run_events WHERE kind = 'state'")
    op.alter_column("runs", "events", server_default=sa.text("0"))
    op.drop_column("finished_runs", "running_seq")
    op.drop_column("runs", "running_seq")
