"""What instances share beside runs, wired for one instance: whoever offers it is made here, and nowhere else.

The public functions of this room are called from anywhere in a service's code, without a handle. Whose instance they
mean is in a context variable, set for each request and for each attempt of a run.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar

from app.fleet.background import Service
from app.fleet.cluster.anomalies import Anomalies
from app.fleet.cluster.member import Member
from app.fleet.coordination.breakers import Breaker, Breakers
from app.fleet.coordination.limits import Limit, Limits
from app.fleet.coordination.locks.anomalies import of_locks
from app.fleet.coordination.locks.lock import HeldLock, Locks, OnLoss, Wanted
from app.fleet.coordination.singletons import Singletons
from app.fleet.db.pool import Database
from app.fleet.duration import Duration
from app.fleet.errors import FleetError, LimitInvalid, LockInvalid
from app.fleet.validation import check_duration


class Coordination:
    def __init__(self, database: Database, member: Member) -> None:
        self.database = database
        self.member = member
        self.locks = Locks(database, member)
        self.limits = Limits(database)
        self.breakers = Breakers(database, member)
        self.anomalies = Anomalies(database, member)
        self.anomalies.add(of_locks)
        # Begun last and handed over first: they are the service's own code.
        self.singletons = Singletons(self.locks)

    @property
    def services(self) -> Sequence[Service]:
        """In the order in which they start."""
        return (self.locks, self.limits, self.breakers, self.anomalies)


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
) -> AbstractAsyncContextManager[HeldLock]:
    """Hold a lock, alone in the whole cluster. Without `wait` for as long as it takes; with 0, now or not at all."""
    wanted = Wanted.of(name, ttl, on_loss)
    patience = None if wait is None else check_duration("wait", wait, LockInvalid)
    return here().locks.hold(wanted, patience, on_loss)


async def limit(name: str, rate: str, *, burst: int = 1, wait: Duration | None = None) -> None:
    """Wait for a permit: so many in so long, in the whole cluster. With `wait`, for so long at most; 0 is at once."""
    wanted = Limit.of(name, rate, burst)
    await here().limits.take(wanted, None if wait is None else check_duration("wait", wait, LimitInvalid))


def breaker(
    name: str,
    *,
    failures: int = 5,
    within: Duration = "60s",
    rest: Duration = "30s",
    probe_timeout: Duration = "60s",
) -> AbstractAsyncContextManager[None]:
    """Guard a body: once it failed so often, anywhere in the cluster, nobody comes in for a while."""
    return here().breakers.guard(Breaker.of(name, failures, within, rest, probe_timeout))
