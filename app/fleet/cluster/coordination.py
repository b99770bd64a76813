"""What instances share beside runs, wired for one instance: whoever offers it is made here, and nowhere else.

The public functions of this room (`lock`, …) are called from anywhere in a service's code, without a handle. Whose
instance they mean is in a context variable, set for each request and for each attempt of a run.
"""

from collections.abc import Sequence
from contextvars import ContextVar

from app.fleet.cluster.member import Member
from app.fleet.db.pool import Database
from app.fleet.errors import FleetError
from app.fleet.service import Service


class Coordination:
    def __init__(self, database: Database, member: Member) -> None:
        self.database = database
        self.member = member

    @property
    def services(self) -> Sequence[Service]:
        """In the order in which they start."""
        return ()


current: ContextVar[Coordination] = ContextVar("flotilla_coordination")


def here() -> Coordination:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "locks, limits and their like are for the code of a running service: a route, or an action"
        ) from None
