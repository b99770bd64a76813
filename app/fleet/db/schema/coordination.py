"""Tables of `app/fleet/coordination`: locks, limits and breakers."""

from sqlalchemy import BigInteger, Column, DateTime, Float, Identity, Index, Integer, Interval, Table, Text, text
from sqlalchemy.dialects.postgresql import ARRAY

from app.fleet.db.schema import metadata

# A row for each name that was ever locked. It stays when the lock is released, so that its token never starts again.
service_locks = Table(
    "service_locks",
    metadata,
    Column("name", Text, primary_key=True),
    # Incremented for each new holder. Writes guarded by an older token are rejected.
    Column("token", BigInteger, nullable=False),
    # The holding instance; null if the lock is free. Name, host and process are for operators.
    Column("instance_id", Integer),
    Column("instance", Text),
    Column("hostname", Text),
    Column("pid", Integer),
    # The request or run within that instance.
    Column("holder", Text),
    # Id of the `lock_waiters` row through which the holder got the lock; null if it did not wait.
    Column("waiter", BigInteger),
    Column("ttl", Interval),
    Column("acquired_at", DateTime(timezone=True)),
    Column("renewed_at", DateTime(timezone=True)),
    Column("expires_at", DateTime(timezone=True)),
    # Only held locks, which are few, while the table keeps every name.
    Index("service_locks_held", "instance_id", postgresql_where=text("instance_id IS NOT NULL")),
    # A held lock is renewed every second, which changes no indexed column.
    postgresql_with={"fillfactor": "50"},
)

# The queue of each lock, in the order of `id`. The rows of an instance are deleted when it is declared gone.
lock_waiters = Table(
    "lock_waiters",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    Column("instance_id", Integer, nullable=False),
    Column("holder", Text),
    Column("ttl", Interval, nullable=False),
    # Names of the locks that the waiter holds, for deadlock detection.
    Column("held", ARRAY(Text), nullable=False),
    Index("lock_waiters_name", "name", "id"),
)

# Locks that an operator released while they were held: by which operator, and for which reason.
lock_releases = Table(
    "lock_releases",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    # The token that the holder lost.
    Column("token", BigInteger, nullable=False),
    Column("instance", Text, nullable=False),
    Column("holder", Text),
    Column("acquired_at", DateTime(timezone=True), nullable=False),
    Column("reason", Text, nullable=False),
    Column("released_by", Text, nullable=False),
    Column("released_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
)

# Violations of mutual exclusion, which must never occur: a second holder got the lock while the first still acted as
# its holder.
lock_overlaps = Table(
    "lock_overlaps",
    metadata,
    Column("id", BigInteger, Identity(), primary_key=True),
    Column("name", Text, nullable=False),
    # The first holder's token and instance, then the second holder's.
    Column("token", BigInteger, nullable=False),
    Column("instance", Text, nullable=False),
    Column("other_token", BigInteger, nullable=False),
    Column("other", Text, nullable=False),
    Column("found_at", DateTime(timezone=True), nullable=False, server_default=text("clock_timestamp()")),
)

# A row for each limit that was ever used.
limits = Table(
    "limits",
    metadata,
    Column("name", Text, primary_key=True),
    # Each permit moves it forward. If it is in the past, permits are available.
    Column("used_until", DateTime(timezone=True), nullable=False),
    # The rate of the last permit, for operators: one every `rate_interval` seconds, at most `rate_burst` at once.
    Column("rate_interval", Float),
    Column("rate_burst", Integer),
    postgresql_with={"fillfactor": "50"},
)

# A row for each breaker whose block ever failed.
breakers = Table(
    "breakers",
    metadata,
    Column("name", Text, primary_key=True),
    # Incremented by each opening, each probe and each closing by hand. A report with an older token changes nothing.
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    # The failures that count while the breaker is closed.
    Column("failed_at", ARRAY(DateTime(timezone=True)), nullable=False, server_default=text("'{}'")),
    # Null while the breaker is closed. If it is in the past, a probe is allowed.
    Column("open_until", DateTime(timezone=True)),
    # Number of openings without a success in between: each opening lasts longer than the one before.
    Column("openings", Integer, nullable=False, server_default=text("0")),
    # The instance whose probe is under way, and how long the other instances wait for its result.
    Column("probe_instance", Integer),
    Column("probe_until", DateTime(timezone=True)),
    postgresql_with={"fillfactor": "50"},
)
