"""What instances share beside runs, wired for one instance: whoever offers it is made here, and nowhere else.

The public functions of this room are called from anywhere in a service's code, without a handle. Whose instance they
mean is in a context variable, set for each request and for each attempt of a run.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import get_args

from app.fleet.cluster.anomalies import Anomalies
from app.fleet.cluster.locks import NAME_MOST, TTL_LEAST, TTL_MOST, Held, Locks, OnLoss, Wanted
from app.fleet.cluster.member import Member
from app.fleet.cluster.singletons import RESERVED, Singletons
from app.fleet.db.pool import Database
from app.fleet.duration import Duration, seconds, written
from app.fleet.errors import FleetError, LockInvalid
from app.fleet.service import Service
from app.fleet.telemetry.logs import request_id


class Coordination:
    def __init__(self, database: Database, member: Member) -> None:
        self.database = database
        self.member = member
        self.locks = Locks(database, member)
        self.singletons = Singletons(self.locks)
        self.anomalies = Anomalies(database, member)

    @property
    def services(self) -> Sequence[Service]:
        """In the order in which they start."""
        return (self.locks, self.anomalies)


# -- for the service's code -------------------------------------------------------------------------------------------

# Whose: set for each request and each attempt.
current: ContextVar[Coordination] = ContextVar("flotilla_coordination")


def here() -> Coordination:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "locks, limits and their like are for the code of a running service: a route, or an action"
        ) from None


def lock(
    name: str, *, ttl: Duration = "10s", wait: Duration | None = None, on_loss: OnLoss = "cancel"
) -> AbstractAsyncContextManager[Held]:
    """Hold a lock, alone in the whole cluster. Without `wait` for as long as it takes; with 0, now or not at all."""
    wanted = checked(name, ttl, on_loss)
    patience = None if wait is None else duration("wait", wait)
    return here().locks.hold(wanted, patience, on_loss)


def checked(name: str, ttl: Duration, on_loss: OnLoss) -> Wanted:
    """Check what was asked for, before anything is written."""
    if not 0 < len(name) <= NAME_MOST or not name.isprintable() or name.startswith(RESERVED):
        raise LockInvalid(
            f"the name of a lock has from 1 to {NAME_MOST} printable letters, and does not begin with {RESERVED!r}"
        )
    if on_loss not in get_args(OnLoss):
        raise LockInvalid(f"`on_loss` is {on_loss!r}, and must be one of {', '.join(map(repr, get_args(OnLoss)))}")
    lasts = duration("ttl", ttl)
    if not TTL_LEAST <= lasts <= TTL_MOST:
        raise LockInvalid(
            f"`ttl` is {written(lasts)}, and must be from {written(TTL_LEAST)} to {written(TTL_MOST)}: it is renewed "
            f"with each heartbeat, once a second, and a shorter one would be lost whenever one of them is late"
        )
    return Wanted(name, lasts, request_id.get())


def duration(option: str, given: Duration) -> float:
    try:
        value = seconds(given)
    except ValueError as error:
        raise LockInvalid(f"`{option}`: {error}") from None
    if value < 0:
        raise LockInvalid(f"`{option}` is {value:g} s, and cannot be negative")
    return value
