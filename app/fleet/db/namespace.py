"""A namespace is a PostgreSQL schema; everything that could meet another deployment is derived from it.

Rows live in the schema. Notifications go over a channel of its name. Advisory locks are pairs whose first number is
the schema's own oid, which no other schema of the database can have, so two namespaces cannot collide, not even by an
unlucky hash; `SELECT classid::regnamespace FROM pg_locks` reads back as the namespace. The second number says what is
locked: the kind in the high bits, the row's id in the low ones. Negative ones are hashes of Idempotency-Keys
(`engine/enqueue/keys.py`), where a collision makes one request wait for another and no more.

Statements are written with `{schema}`, `{class}` and `{channel}` in them and go through `Namespace.sql`. Nothing here
depends on `search_path`, which a pooler in transaction mode would not keep.
"""

import enum
from dataclasses import dataclass, field

ID_BITS = 28


class Lock(enum.IntEnum):
    """What an advisory lock of this namespace is about."""

    PRESENCE = 0
    ACTION = 1
    FEED = 2

    def key(self, row_id: int) -> int:
        """Return the second number of the lock; a row id above 28 bits is refused by the id's sequence already."""
        return (self.value << ID_BITS) | row_id


class Statement(str):
    """A SQL statement of this project, whole, with `{schema}`, `{class}` and `{channel}` in it.

    `python -m app.fleet.sql` finds every statement by this type, and prints it as it is sent.
    """

    __slots__ = ()


@dataclass(frozen=True)
class Namespace:
    name: str
    _statements: dict[Statement, bytes] = field(default_factory=dict, compare=False, repr=False)

    @property
    def schema(self) -> str:
        return self.name.replace("-", "_")

    @property
    def channel(self) -> str:
        return self.schema

    def sql(self, statement: Statement) -> bytes:
        """Fill in a statement of this project. The schema is `[a-z0-9_]` only, so quoting it is enough."""
        if statement not in self._statements:
            # The schema is derived from a checked name, not from anyone's input.
            oid = f"(SELECT oid::int4 FROM pg_catalog.pg_namespace WHERE nspname = '{self.schema}')"
            filled = statement.replace("{schema}", f'"{self.schema}"').replace("{class}", oid)
            self._statements[statement] = filled.replace("{channel}", self.channel).encode()
        return self._statements[statement]
