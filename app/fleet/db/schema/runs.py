"""Tables of `app/fleet/runs`: actions, runs, their keys, events and tracebacks, and the feed."""

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Computed,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    Interval,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY

from app.fleet.db.schema import metadata

# Each action as the code declared it last. All instances schedule and limit by these rows, whatever release they run.
actions = Table(
    "actions",
    metadata,
    # The id is part of an advisory lock's key: 28 bits, and never reused.
    Column("id", Integer, Identity(maxvalue=2**28 - 1), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    # `every 1m` or `cron */5 * * * * in Europe/Berlin`, with jitter; null for an action that is only triggered.
    Column("schedule", Text),
    Column("misfire", Text, nullable=False),
    Column("overlap", Text, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("max_attempts", Integer, nullable=False),
    Column("retention", Interval, nullable=False),
    # Maximum number of running runs in the whole cluster.
    Column("concurrency", Integer),
    # Limit on starts: one every `rate_interval` seconds, at most `rate_burst` of them at once.
    Column("rate_interval", Float),
    Column("rate_burst", Integer),
    # Each start moves it forward. If it is in the past, starts are available.
    Column("rate_used_until", DateTime(timezone=True)),
    # The next slot. The instance that claims the slot moves it forward, under the action's advisory lock. It has no
    # index, because actions are few and each slot changes it.
    Column("next_run_at", DateTime(timezone=True)),
    Column("paused_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    # Delay before the first retry and maximum delay, in seconds (`runs/effects/retry_delay.py`).
    Column("retry_delay", Float, nullable=False, server_default=text("1")),
    Column("max_retry_delay", Float, nullable=False, server_default=text("600")),
    CheckConstraint("misfire IN ('once', 'all', 'skip')", name="misfire"),
    CheckConstraint("overlap IN ('skip', 'queue', 'allow')", name="overlap"),
    postgresql_with={"fillfactor": "50"},
)

# The hot path: only pending and running runs. A run that ends moves to `finished_runs` and keeps its id.
runs = Table(
    "runs",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("action_id", Integer, nullable=False),
    Column("state", Text, nullable=False, server_default=text("'pending'")),
    # Has no effect on an ordered run: it is claimed at the priority of its action.
    Column("priority", Integer, nullable=False),
    # Earliest start; also the order within a priority.
    Column("run_at", DateTime(timezone=True), nullable=False),
    # The fencing token. Only a new claim increments it.
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    # The instance that runs it or ran it last.
    Column("instance_id", Integer),
    Column("instance", Text),
    # Number of claims. A pause and an undone claim subtract it; an operator's retry starts again from 0.
    Column("attempt", Integer, nullable=False, server_default=text("0")),
    Column("max_attempts", Integer, nullable=False),
    # Number of attempts that ended because their instance was declared gone. They do not count towards `max_attempts`
    # (`engine/maintenance/rescuer.py`).
    Column("deaths", Integer, nullable=False, server_default=text("0")),
    Column("trigger", Text, nullable=False),
    # The slot of a scheduled run.
    Column("scheduled_for", DateTime(timezone=True)),
    Column("key", Text),
    # Runs of one action with the same ordering key execute one at a time, in the order of their ids. A run that has one
    # is an ordered run (`engine/dispatch/ordered.py`). It is in none of the indexes of the other pending runs.
    Column("ordering_key", Text(collation="C")),
    # JSON and not JSONB: stored as it was sent, and never parsed on the hot path.
    Column("payload", JSON),
    Column("checkpoint", JSON),
    Column("progress", JSON),
    Column("error", Text),
    # Number of events, state changes included; the first is the creation.
    Column("events", Integer, nullable=False, server_default=text("1")),
    # Sequence number of the latest `running` event.
    Column("running_seq", Integer),
    Column("cancel_requested_at", DateTime(timezone=True)),
    Column("created_at", DateTime(timezone=True), nullable=False, server_default=text("now()")),
    Column("started_at", DateTime(timezone=True)),
    Column("deadline_at", DateTime(timezone=True)),
    # The run in whose attempt it was triggered. That run may have been deleted since.
    Column("triggered_by", BigInteger),
    # The request that triggered the run, directly or through other runs. Null for a scheduled run.
    Column("request_id", Text),
    # The span in which the run was triggered, as in a `traceparent` header; null without tracing.
    Column("trace_parent", Text),
    CheckConstraint("state IN ('pending', 'running')", name="state"),
    # PostgreSQL has instants that Python cannot represent. One such row would break every statement that returns it.
    CheckConstraint("run_at BETWEEN '1970-01-01 00:00:00+00' AND '9999-01-01 00:00:00+00'", name="run_at"),
    # The queues: pending runs of an action with a priority, and the pending ordered runs of an action.
    Index(
        "runs_pending",
        "action_id",
        "priority",
        "run_at",
        "id",
        postgresql_where=text("state = 'pending' AND ordering_key IS NULL"),
    ),
    Index(
        "runs_ordered_pending",
        "action_id",
        "run_at",
        postgresql_where=text("state = 'pending' AND ordering_key IS NOT NULL"),
    ),
    # The newest pending runs of an action. A claim adds no entry.
    Index("runs_pending_newest", "action_id", "id", postgresql_where=text("state = 'pending'")),
    Index("runs_running", "action_id", "instance_id", postgresql_where=text("state = 'running'")),
    # The runs that a run has triggered, newest first.
    Index("runs_triggered_by", "triggered_by", "id", postgresql_where=text("triggered_by IS NOT NULL")),
    # A scan goes from one ordering key to the next, and within a key from its first run on, in whatever state.
    Index("runs_ordered", "action_id", "ordering_key", "id", postgresql_where=text("ordering_key IS NOT NULL")),
    # At most one running run per ordering key.
    Index(
        "runs_ordered_running",
        "action_id",
        "ordering_key",
        unique=True,
        postgresql_where=text("state = 'running' AND ordering_key IS NOT NULL"),
    ),
    # Rows may live for milliseconds only: vacuum after a fixed number of dead rows, and without pauses.
    postgresql_with={
        "fillfactor": "70",
        "autovacuum_vacuum_scale_factor": "0",
        "autovacuum_vacuum_threshold": "20000",
        "autovacuum_vacuum_cost_delay": "0",
        "autovacuum_analyze_scale_factor": "0.5",
    },
)

# As PostgreSQL prints it, because the model is compared with the database.
ALIKE = r"""
CASE WHEN state = 'failed'::text THEN hashtextextended(
    regexp_replace(
        left(COALESCE(error, ''::text), 500) COLLATE "C", '"[^"]*"|(?<!\w)''[^'']*''|\S*[0-9@]\S*'::text,
        '#'::text, 'g'::text
    ), 0::bigint
) ELSE NULL::bigint END
"""

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
    Column("triggered_by", BigInteger),
    Column("request_id", Text),
    Column("trace_parent", Text),
    # After this instant the pruner deletes the run, its events, its tracebacks and its key.
    Column("expires_at", DateTime(timezone=True), nullable=False),
    # Failed runs of one action with errors that differ only in quoted texts and in words with a digit or an `@` have
    # the same number here; null for other runs (`runs/read/alike.py`).
    Column("alike", BigInteger, Computed(ALIKE, persisted=True)),
    CheckConstraint("state IN ('succeeded', 'failed', 'cancelled')", name="state"),
    Index("finished_runs_action_state", "action_id", "state", "id"),
    Index("finished_runs_expiry", "expires_at"),
    Index("finished_runs_triggered_by", "triggered_by", "id", postgresql_where=text("triggered_by IS NOT NULL")),
    # The runs an operator looks for among millions of succeeded ones.
    Index("finished_runs_alike", "action_id", "alike", "id", postgresql_where=text("alike IS NOT NULL")),
    Index("finished_runs_unwell", "state", "id", postgresql_where=text("state <> 'succeeded'")),
)

# At most one run per key, for as long as the run is retained: `slot:…` for a slot of the schedule, `key:…` for a
# caller's key. A second insert conflicts with this row, whichever table the run is in by then.
run_keys = Table(
    "run_keys",
    metadata,
    Column("action_id", Integer, nullable=False),
    Column("key", Text, nullable=False),
    Column("run_id", BigInteger, nullable=False),
    # Digest of the request with this `Idempotency-Key`: another body with the same key is rejected.
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

# The tracebacks of the failed attempts among the last `MAX_TRACEBACKS` claims of a run (`runs/attempt_writes.py`). The
# number of an attempt may occur twice: a pause gives it back, and an operator's retry starts again from 0.
run_tracebacks = Table(
    "run_tracebacks",
    metadata,
    Column("run_id", BigInteger, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("instance", Text),
    # The beginning of the error of the attempt.
    Column("error", Text, nullable=False),
    Column("traceback", Text, nullable=False),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    PrimaryKeyConstraint("run_id", "token"),
)

# Every state change of every run: one row for each statement, state and instance, retained for `feed_settings.kept`.
feed = Table(
    "feed",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    # Number of the first change in this row; null until a reader has numbered the row.
    Column("first", BigInteger),
    Column("at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
    Column("state", Text, nullable=False),
    Column("instance", Text),
    # The number of runs, and one element per run in each array:
    Column("many", Integer, nullable=False),
    Column("runs", ARRAY(BigInteger), nullable=False),
    Column("actions", ARRAY(Integer), nullable=False),
    Column("seqs", ARRAY(Integer), nullable=False),
    Column("attempts", ARRAY(Integer), nullable=False),
    Index("feed_first", "first", unique=True, postgresql_where=text("first IS NOT NULL")),
    Index("feed_new", "id", postgresql_where=text("first IS NULL")),
)

# One row. If `kept` is zero, nothing is written to the feed.
feed_settings = Table("feed_settings", metadata, Column("kept", Interval, nullable=False))
