"""Locks, limits, breakers and singletons, wired for one instance; and the public functions `lock`, `limit`, `breaker`.

Service code calls the public functions anywhere, without a handle to the instance. The context variable `current` has
the instance; it is set for each request and for each attempt of a run.
"""

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar

from app.fleet.background import Service
from app.fleet.cluster.anomalies import Anomalies
from app.fleet.cluster.member import Member
from app.fleet.coordination.breakers import Breaker, Breakers
from app.fleet.coordination.limits import Limits
from app.fleet.coordination.locks.anomalies import of_locks
from app.fleet.coordination.locks.held import HeldLock, LockRequest, OnLoss
from app.fleet.coordination.locks.lock import Locks
from app.fleet.coordination.permits import Limit
from app.fleet.coordination.singletons import Singletons
from app.fleet.db.pool.pool import Database
from app.fleet.duration import Duration
from app.fleet.errors import FleetError, LimitInvalid, LockInvalid
from app.fleet.validation import check_duration


class Coordination:
    def __init__(self, database: Database, member: Member) -> None:
        self.locks = Locks(database, member)
        self.limits = Limits(database)
        self.breakers = Breakers(database, member)
        self.anomalies = Anomalies(database, member)
        self.anomalies.add(of_locks)
        # In the order in which they start.
        self.services: Sequence[Service] = (self.locks, self.limits, self.breakers, self.anomalies)
        # Not one of `services`: singletons are the service's own code, so they start last and stop first.
        self.singletons = Singletons(self.locks)


# -- for the service's code -------------------------------------------------------------------------------------------

current: ContextVar[Coordination] = ContextVar("flotilla_coordination")


def here() -> Coordination:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "locks, limits and breakers are only available in the code of a running service: in a route or an action"
        ) from None


def lock(
    name: str, *, ttl: Duration = "10s", wait: Duration | None = None, on_loss: OnLoss = "cancel"
) -> AbstractAsyncContextManager[HeldLock]:
    """Hold a lock while the block runs. `wait` limits how long to wait for it: 0 does not wait, None has no limit."""
    request = LockRequest.of(name, ttl, on_loss)
    seconds = None if wait is None else check_duration("wait", wait, LockInvalid)
    return here().locks.hold(request, seconds, on_loss)


async def limit(name: str, rate: str, *, burst: int = 1, wait: Duration | None = None) -> None:
    """Wait for a permit of a rate limit that all instances share. `wait` limits how long: 0 does not wait."""
    checked = Limit.of(name, rate, burst)
    seconds = None if wait is None else check_duration("wait", wait, LimitInvalid)
    await here().limits.take(checked, seconds)


def breaker(
    name: str,
    *,
    failures: int = 5,
    within: Duration = "60s",
    rest: Duration = "30s",
    probe_timeout: Duration = "60s",
) -> AbstractAsyncContextManager[None]:
    """Guard a block: after `failures` failures in the whole cluster, refuse it everywhere for a while."""
    return here().breakers.guard(Breaker.of(name, failures, within, rest, probe_timeout))
