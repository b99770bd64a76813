"""The fleet's tables. Columns are explained here; the statements that use them live in the rooms above.

No table names a schema: it is the namespace's, put in by `Namespace.sql` or by SQLAlchemy's translation map.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Index,
    Integer,
    MetaData,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

NAMING = {
    "ix": "%(table_name)s_%(column_0_N_name)s",
    "uq": "%(table_name)s_%(column_0_N_name)s_key",
    "ck": "%(table_name)s_%(constraint_name)s_check",
    "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
    "pk": "%(table_name)s_pkey",
}

metadata = MetaData(naming_convention=NAMING)

# Never reused: an id is in lock keys and log lines long after its instance is gone. 28 bits (see `Lock.key`).
instance_ids = Sequence("instance_ids", data_type=Integer, maxvalue=2**28 - 1, metadata=metadata)
# The number in a name nobody chose. It grows for ever, so that a log's `flotilla-7` is one instance and not two.
instance_numbers = Sequence("instance_numbers", metadata=metadata)

instances = Table(
    "instances",
    metadata,
    Column("id", Integer, primary_key=True, autoincrement=False),
    Column("name", Text, nullable=False),
    Column("run_id", Uuid, nullable=False),
    Column("state", Text, nullable=False),
    Column("hostname", Text, nullable=False),
    Column("pid", Integer, nullable=False),
    Column("port", Integer),
    Column("version", Text, nullable=False),
    Column("workspace", Text),
    Column("workspace_shared", Boolean, nullable=False, server_default=text("false")),
    # How many sessions it may open, for the connection budget.
    Column("connections", Integer, nullable=False),
    Column("running", Integer, nullable=False, server_default=text("0")),
    Column("started_at", DateTime(timezone=True), nullable=False),
    Column("heartbeat_at", DateTime(timezone=True), nullable=False),
    # Which server its presence lock was taken on: after a restart or a failover these differ, and a free lock is
    # then no sign of death.
    Column("server_started_at", DateTime(timezone=True), nullable=False),
    # The backend of its session in the queue for leadership.
    Column("turn_pid", Integer),
    Column("drain_requested_at", DateTime(timezone=True)),
    Column("drain_reason", Text),
    Column("gone_at", DateTime(timezone=True)),
    Column("gone_reason", Text),
    # The ordered shutdown as it went: [{"step", "ms", "outcome"}].
    Column("shutdown", JSONB),
    CheckConstraint("state IN ('starting', 'ready', 'draining', 'gone')", name="state"),
    # Unique among the living. A name or workspace is free again in the moment its holder is declared gone.
    Index("instances_name_living", "name", unique=True, postgresql_where=text("state <> 'gone'")),
    Index(
        "instances_workspace_living",
        "workspace",
        unique=True,
        postgresql_where=text("state <> 'gone' AND NOT workspace_shared"),
    ),
    # A heartbeat touches no indexed column and finds room on its page: it leaves no dead index entries behind.
    postgresql_with={"fillfactor": "50"},
)
