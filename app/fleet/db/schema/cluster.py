"""Tables of `app/fleet/cluster`: the instances, and the terms of leadership."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

from app.fleet.db.schema import metadata

# An id is never reused: lock keys and log lines contain it long after its instance is gone. 28 bits (see `Lock.key`).
instance_ids = Sequence("instance_ids", data_type=Integer, maxvalue=2**28 - 1, metadata=metadata)
# The number in a generated name. It is never reused, so that `flotilla-7` is the same instance in all logs.
instance_numbers = Sequence("instance_numbers", metadata=metadata)

instances = Table(
    "instances",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("state", Text, nullable=False),
    # An older release, which knows no roles, does everything.
    Column("role", Text, nullable=False, server_default="all"),
    Column("hostname", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("port", Integer),
    Column("version", Text, nullable=False),
    Column("workspace", Text),
    Column("workspace_shared", Boolean, nullable=False, server_default=text("false")),
    # The maximum number of sessions that the instance opens, for the connection budget.
    Column("connections", Integer, nullable=False),
    # How many runs it executes at the same time, for the autoscaler's view.
    Column("concurrency", Integer, nullable=False, server_default=text("100")),
    Column("running", Integer, nullable=False, server_default=text("0")),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("heartbeat_at", DateTime(timezone=True), nullable=False),
    # Start of the server on which the presence lock was taken. If it is not the present server's, the server was
    # restarted or failed over, and a free presence lock does not prove that the instance ended.
    Column("server_started_at", DateTime(timezone=True), nullable=False),
    # Backend pid of the instance's session in the leader queue.
    Column("turn_pid", Integer),
    # Seconds by which the machine's clock was ahead of PostgreSQL's at the last heartbeat. For operators only.
    Column("clock_ahead", Float),
    # Age of the oldest borrowed connection of the pool, if it exceeds what a transaction should take; otherwise null.
    Column("connection_out_seconds", Float),
    Column("drain_requested_at", DateTime(timezone=True)),
    Column("drain_reason", Text),
    Column("gone_at", DateTime(timezone=True)),
    Column("gone_reason", Text),
    # The steps of the ordered shutdown, also while it happens: [{"step", "ms", "outcome"}].
    Column("shutdown", JSONB),
    CheckConstraint("state IN ('starting', 'ready', 'draining', 'gone')", name="state"),
    CheckConstraint("role IN ('all', 'web', 'worker')", name="role"),
    # Unique among live instances: a name or workspace is free as soon as its instance is declared gone.
    Index("instances_name_living", "name", unique=True, postgresql_where=text("state <> 'gone'")),
    Index(
        "instances_workspace_living",
        "workspace",
        unique=True,
        postgresql_where=text("state <> 'gone' AND NOT workspace_shared"),
    ),
    # A heartbeat changes no indexed column and finds space on its page, so that it leaves no dead index entries.
    postgresql_with={"fillfactor": "50"},
)

# The history of leadership: it shows whether the leader changes too often.
leader_terms = Table(
    "leader_terms",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("instance_id", Integer, nullable=False),
    Column("instance", Text, nullable=False),
    Column("began_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Index("leader_terms_began_at", "began_at"),
)
