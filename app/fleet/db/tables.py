"""The fleet's tables. Columns are explained here; the statements that use them live in the rooms above.

No table names a schema: it is the namespace's, put in by `Namespace.sql` or by SQLAlchemy's translation map.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    Interval,
    MetaData,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

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
    # How far its machine's clock is ahead of PostgreSQL's, in seconds, as of its last heartbeat; for people.
    Column("clock_ahead", Float),
    # How long a connection of its pool has been out, if that is longer than any transaction should last.
    Column("connection_out_seconds", Float),
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

# Who led when: to see whether leadership changes hands too often.
leader_terms = Table(
    "leader_terms",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("instance_id", Integer, nullable=False),
    Column("instance", Text, nullable=False),
    Column("began_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Index("leader_terms_began_at", "began_at"),
)

# A row for each name that was ever locked, held or not: its token never starts again.
service_locks = Table(
    "service_locks",
    metadata,
    Column("name", Text, primary_key=True),
    # Moved on each time somebody is let in; whatever is guarded by an older one is refused.
    Column("token", BigInteger, nullable=False),
    # Who holds it; null if nobody does. The name, the host and the process are for operators.
    Column("instance_id", Integer),
    Column("instance", Text),
    Column("hostname", Text),
    Column("pid", Integer),
    # The request or the run.
    Column("holder", Text),
    # Its place in the queue, if it came from there.
    Column("waiter", BigInteger),
    Column("ttl", Interval),
    Column("acquired_at", DateTime(timezone=True)),
    Column("renewed_at", DateTime(timezone=True)),
    Column("expires_at", DateTime(timezone=True)),
    # Those that are held: few, of a table in which every name stays.
    Index("service_locks_held", "instance_id", postgresql_where=text("instance_id IS NOT NULL")),
    # Renewed every second, and no indexed column is touched by it.
    postgresql_with={"fillfactor": "50"},
)

# The queue at a lock, in the order of `id`. An instance's death takes its rows away.
lock_waiters = Table(
    "lock_waiters",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    Column("instance_id", Integer, nullable=False),
    Column("holder", Text),
    Column("ttl", Interval, nullable=False),
    # What the one who waits holds meanwhile: how those who wait for each other are found out.
    Column("held", ARRAY(Text), nullable=False),
    Index("lock_waiters_name", "name", "id"),
)

# Locks that an operator released although somebody held them: who, and why.
lock_releases = Table(
    "lock_releases",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    # The token that was taken away.
    Column("token", BigInteger, nullable=False),
    Column("instance", Text, nullable=False),
    Column("holder", Text),
    Column("acquired_at", DateTime(timezone=True), nullable=False),
    Column("reason", Text, nullable=False),
    Column("released_by", Text, nullable=False),
    Column("released_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
)

# What must never be, and is looked for all the same: somebody was let into a lock while its holder still acted as such.
lock_overlaps = Table(
    "lock_overlaps",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    # The holder's, and the one of whoever was let in.
    Column("token", BigInteger, nullable=False),
    Column("instance", Text, nullable=False),
    Column("other_token", BigInteger, nullable=False),
    Column("other", Text, nullable=False),
    Column("found_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
)

# What the code declared last, so that every instance schedules and limits by the same words, whatever release it runs.
actions = Table(
    "actions",
    metadata,
    # The other number in an advisory lock's key, so again 28 bits and never reused.
    Column("id", Integer, Identity(maxvalue=2**28 - 1), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    # `every 1m` or `cron */5 * * * * in Europe/Berlin`, with jitter; null for an action that is only triggered.
    Column("schedule", Text),
    Column("misfire", Text, nullable=False),
    Column("overlap", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("retention", Interval, nullable=False),
    # How many may run at once in the whole cluster.
    Column("concurrency", Integer),
    # How many may start: one each `rate_interval` seconds, `rate_burst` of them at once.
    Column("rate_interval", Float),
    Column("rate_burst", Integer),
    # When the allowance is used up to; in the past, there is some left.
    Column("rate_used_until", DateTime(timezone=True)),
    # The slot that is due next. Moved on by whoever claims it, under the action's advisory lock. Not indexed: there
    # are few actions, and each slot moves it.
    Column("next_run_at", DateTime(timezone=True)),
    Column("paused_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    # Of a retry, in seconds: the first wait, and the longest (`runs/retry_delay.py`).
    Column("retry_delay", Float, nullable=False, server_default=text("1")),
    Column("max_retry_delay", Float, nullable=False, server_default=text("600")),
    CheckConstraint("misfire IN ('once', 'all', 'skip')", name="misfire"),
    CheckConstraint("overlap IN ('skip', 'queue', 'allow')", name="overlap"),
    postgresql_with={"fillfactor": "50"},
)

# Which actions a living instance has in its code: those it schedules and claims. Gone with the instance.
standby = Table(
    "standby",
    metadata,
    Column("instance_id", Integer, primary_key=True, autoincrement=False),
    Column("action_ids", ARRAY(Integer), nullable=False),
)

# A row for each limit that somebody ever waited for.
limits = Table(
    "limits",
    metadata,
    Column("name", Text, primary_key=True),
    # Moved on by each permit. In the past, some is left.
    Column("used_until", DateTime(timezone=True), nullable=False),
    postgresql_with={"fillfactor": "50"},
)

# A row for each breaker whose body ever failed.
breakers = Table(
    "breakers",
    metadata,
    Column("name", Text, primary_key=True),
    # Moved on by each opening and each probe, and never back. A report with an older one changes nothing.
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    # The failures that count, while it is closed.
    Column("failed_at", ARRAY(DateTime(timezone=True)), nullable=False, server_default=text("'{}'")),
    # Null while it is closed. In the past, one may probe.
    Column("open_until", DateTime(timezone=True)),
    # In a row, without a success between them: each lasts longer.
    Column("openings", Integer, nullable=False, server_default=text("0")),
    # Whose probe is under way, and how long the others wait for it.
    Column("probe_instance", Integer),
    Column("probe_until", DateTime(timezone=True)),
    postgresql_with={"fillfactor": "50"},
)

# The hot path: runs that wait or run, and nothing else. A run that ends moves to `finished_runs`, under the same id.
runs = Table(
    "runs",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("action_id", Integer, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'pending'")),
    # Of a run in a line, less than any other's by far: it waits at a place of its own (`engine/dispatch/ordered.py`).
    Column("priority", Integer, nullable=False),
    # Not before; the order within a priority.
    Column("run_at", DateTime(timezone=True), nullable=False),
    # The fencing token. Moved by a new claim, and by nothing else, ever.
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    # Who runs it, or ran it last.
    Column("instance_id", Integer),
    Column("instance", Text),
    # How often it was claimed; a pause takes its claim back, an operator's retry starts again from 0.
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", Integer, nullable=False),
    # How many of these ended with the death of their instance; they are not held against it
    # (`engine/maintenance/rescuer.py`).
    Column("deaths", Integer, nullable=False, server_default=text("0")),
    Column("trigger", Text, nullable=False),
    # The slot, of a scheduled run.
    Column("scheduled_for", DateTime(timezone=True)),
    Column("key", Text),
    # Runs of an action with the same one are a line: one after another, in the order of their ids.
    Column("ordering_key", Text(collation="C")),
    # JSON and not JSONB: kept as it was sent, and never taken apart on the hot path.
    Column("payload", JSON),
    Column("checkpoint", JSON),
    Column("progress", JSON),
    Column("error", Text),
    # How many events it has, its changes of state among them; the first is that it was made.
    Column("events", Integer, nullable=False, server_default=text("1")),
    # Which of them is that it began, the last time it did.
    Column("running_seq", Integer),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    Column("started_at", DateTime(timezone=True)),
    Column("deadline_at", DateTime(timezone=True)),
    CheckConstraint("state IN ('pending', 'running')", name="state"),
    # PostgreSQL has instants beyond those that Python can read: one such row, and no statement could read the others.
    CheckConstraint("run_at BETWEEN '1970-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00'", name="run_at"),
    Index("runs_pending", "action_id", "priority", "run_at", "id", postgresql_where=text("state = 'pending'")),
    # Of an action, the newest that wait. A claim adds nothing to it.
    Index("runs_pending_newest", "action_id", "id", postgresql_where=text("state = 'pending'")),
    Index("runs_running", "action_id", "instance_id", postgresql_where=text("state = 'running'")),
    # From line to line, and in each from its first run on, whatever state that is in.
    Index("runs_lines", "action_id", "ordering_key", "id", postgresql_where=text("ordering_key IS NOT NULL")),
    # Of a line, one runs.
    Index(
        "runs_lines_running",
        "action_id",
        "ordering_key",
        unique=True,
        postgresql_where=text("state = 'running' AND ordering_key IS NOT NULL"),
    ),
    # Rows live for milliseconds here: vacuum by count, not by share, and without pauses.
    postgresql_with={
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0",
        "autovacuum_vacuum_threshold": "20000",
        "autovacuum_vacuum_cost_delay": "0",
        "autovacuum_analyze_scale_factor": "0.5",
    },
)

finished_runs = Table(
    "finished_runs",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("action_id", Integer, nullable=False),
    Column("state", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("run_at", DateTime(timezone=True), nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("instance", Text),
    Column("attempt", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("trigger", Text, nullable=False),
    Column("scheduled_for", DateTime(timezone=True)),
    Column("key", Text),
    Column("ordering_key", Text(collation="C")),
    Column("payload", JSON),
    Column("checkpoint", JSON),
    Column("progress", JSON),
    Column("result", JSON),
    Column("error", Text),
    Column("events", Integer, nullable=False),
    Column("running_seq", Integer),
    Column("created_at", DateTime(timezone=True), nullable=False),
    Column("started_at", DateTime(timezone=True)),
    Column("finished_at", DateTime(timezone=True), nullable=False),
    # When it may be forgotten, with its events and its key.
    Column("expires_at", DateTime(timezone=True), nullable=False),
    CheckConstraint("state IN ('succeeded', 'failed', 'cancelled')", name="state"),
    Index("finished_runs_action_state", "action_id", "state", "id"),
    Index("finished_runs_expiry", "expires_at"),
    # What an operator looks for among millions that went well.
    Index("finished_runs_unwell", "state", "id", postgresql_where=text("state <> 'succeeded'")),
)

# A key makes one run, for as long as that run is remembered: `slot:…` for an instant of the schedule, `key:…` for a
# caller's. It is what a second insert meets, whichever table the run is in by then.
run_keys = Table(
    "run_keys",
    metadata,
    Column("action_id", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("run_id", BigInteger, nullable=False),
    # Of the request that came with an `Idempotency-Key`: another body under the same key is a mistake.
    Column("digest", Text),
    PrimaryKeyConstraint("action_id", "key"),
    Index("run_keys_run_id", "run_id"),
)

run_events = Table(
    "run_events",
    metadata,
    Column("run_id", BigInteger, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", Text, nullable=False),
    Column("data", JSON),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    PrimaryKeyConstraint("run_id", "seq"),
)

# Every change of state of every run, a row for each statement's worth of them, until `kept` is over.
feed = Table(
    "feed",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    # The number of the first change in it, once somebody has given it one.
    Column("first", BigInteger),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("state", Text, nullable=False),
    Column("instance", Text),
    # How many runs; and for each of them, in the same place of each array:
    Column("many", Integer, nullable=False),
    Column("runs", ARRAY(BigInteger), nullable=False),
    Column("actions", ARRAY(Integer), nullable=False),
    Column("seqs", ARRAY(Integer), nullable=False),
    Column("attempts", ARRAY(Integer), nullable=False),
    Index("feed_first", "first", unique=True, postgresql_where=text("first IS NOT NULL")),
    Index("feed_new", "id", postgresql_where=text("first IS NULL")),
)

# One row. Not kept at all: nothing is written to the feed.
feed_settings = Table("feed_settings", metadata, Column("kept", Interval, nullable=False))

# One for each block of `once`: higher than that of any block that had the same key before, also if it was forgotten in
# between. Without a cache, which would hand them out of order.
once_tokens = Sequence("once_tokens", metadata=metadata)

# A key that is being processed, or was. Full pages: what makes it seen changes an indexed column, so that room left on
# the page would save nothing.
once_keys = Table(
    "once_keys",
    metadata,
    # By their bytes, which is quick, and the order in which keys are locked.
    Column("scope", Text(collation="C"), nullable=False),
    Column("key", Text(collation="C"), nullable=False),
    # The fencing token: of the block that took it last.
    Column("token", BigInteger, nullable=False),
    Column("state", Text, nullable=False),
    # Who took it: the instance, and of a run the attempt. While it is `pending`, its owner.
    Column("instance_id", Integer, nullable=False),
    Column("run_id", BigInteger),
    Column("run_token", BigInteger),
    Column("taken_at", DateTime(timezone=True), nullable=False),
    # Until when it is remembered. Null while it is `pending`.
    Column("expires_at", DateTime(timezone=True)),
    CheckConstraint("state IN ('pending', 'seen', 'free')", name="state"),
    PrimaryKeyConstraint("scope", "key"),
    # Each row is in one of these, and few are in the first: what has been pending for too long, what may be forgotten.
    Index("once_keys_pending", "taken_at", postgresql_where=text("state = 'pending'")),
    Index("once_keys_expiry", "expires_at", postgresql_where=text("state <> 'pending'")),
    # Each key leaves an entry behind in the first of them; the next who looks at it walks through those that are left.
    postgresql_with={"autovacuum_vacuum_scale_factor": "0.05"},
)
