"""Tables of `app/fleet/engine/once`: the seen-store."""

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    text,
)

from app.fleet.db.schema import metadata

# The fencing token of each `once` block: higher than the token of every earlier block with the same key, also if the
# key was forgotten in between. The sequence has no cache, because cached values would be used out of order.
once_tokens = Sequence("once_tokens", metadata=metadata)

# A key that is being processed or was processed. The pages are filled completely: the change to `seen` changes an
# indexed column, so that free space on the page would save nothing.
once_keys = Table(
    "once_keys",
    metadata,
    # Collation "C" compares bytes, which is fast; keys are locked in this order.
    Column("scope", Text(collation="C"), nullable=False),
    Column("key", Text(collation="C"), nullable=False),
    # The fencing token of the block that took the key last.
    Column("token", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    # The instance that took the key, and the attempt if a run took it. While the key is `pending`, they own it.
    Column("instance_id", Integer, nullable=False),
    Column("run_id", BigInteger),
    Column("run_token", BigInteger),
    Column("taken_at", DateTime(timezone=True), nullable=False),
    # The key is forgotten after this instant. Null while the key is `pending`.
    Column("expires_at", DateTime(timezone=True)),
    CheckConstraint("state IN ('pending', 'seen', 'free')", name="state"),
    PrimaryKeyConstraint("scope", "key"),
    # Each row is in one of these: keys that have been pending for too long (few), and keys to forget.
    Index("once_keys_pending", "taken_at", postgresql_where=text("state = 'pending'")),
    Index("once_keys_expiry", "expires_at", postgresql_where=text("state <> 'pending'")),
    # Each key leaves a dead entry in `once_keys_pending`, and scans of that index read all of them until a vacuum.
    postgresql_with={"autovacuum_vacuum_scale_factor": "0.05"},
)
