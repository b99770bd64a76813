"""A namespace is a PostgreSQL schema. Everything that two deployments in one database could share is derived from it.

The tables are in the schema, and the channel for notifications has its name. The key of an advisory lock is a pair of
numbers. The first is the oid of the schema, so that two namespaces cannot collide as hashes could;
`SELECT classid::regnamespace FROM pg_locks` shows the namespace. The second is what is locked: the kind in the high
bits and the id of the row in the low bits. Negative numbers are hashes of Idempotency-Keys
(`engine/enqueue/keys.py`), where a collision only makes one request wait for another.

Statements contain `{schema}`, `{class}` and `{channel}`, which `Namespace.sql` fills in. They do not depend on
`search_path`, which a pooler in transaction mode does not keep.
"""

import enum
from dataclasses import dataclass, field

ID_BITS = 28


class Lock(enum.IntEnum):
    """The kinds of advisory locks of a namespace."""

    PRESENCE = 0
    ACTION = 1
    FEED = 2

    def key(self, row_id: int) -> int:
        """Return the second number of the lock's key. The sequences of the ids end at 28 bits."""
        return (self.value << ID_BITS) | row_id


class Statement(str):
    """A complete SQL statement, with the placeholders `{schema}`, `{class}` and `{channel}`.

    `python -m app.fleet.sql` finds every statement by this type and prints it as it is sent.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Namespace:
    name: str
    _statements: dict[Statement, bytes] = field(default_factory=dict, compare=False, repr=False)

    @property
    def schema(self) -> str:
        return self.name.replace("-", "_")

    def application(self, role: str) -> str:
        """Return the name of a session, as `pg_stat_activity` shows it: PostgreSQL keeps 63 bytes."""
        return f"flotilla/{self.name}/{role}"[:63]

    def sql(self, statement: Statement) -> bytes:
        """Fill in the placeholders. The schema contains only `[a-z0-9_]`, so quoting it is enough."""
        if statement not in self._statements:
            # The schema is derived from a validated setting, not from a request.
            oid = f"(SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = '{self.schema}')"
            filled = statement.replace("{schema}", f'"{self.schema}"').replace("{class}", oid)
            self._statements[statement] = filled.replace("{channel}", self.schema).encode()
        return self._statements[statement]
