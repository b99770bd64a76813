"""The public API of Flotilla: everything that a service imports. Any other module of `app.fleet` may change."""

from app.fleet.coordination.coordination import breaker, limit, lock
from app.fleet.coordination.locks.held import HeldLock
from app.fleet.coordination.singletons import singleton
from app.fleet.edge.callers.caller import Caller
from app.fleet.engine.actions.action import Action, action
from app.fleet.engine.actions.run import Run
from app.fleet.engine.enqueue.following import follow, result
from app.fleet.engine.enqueue.orders import Order
from app.fleet.engine.enqueue.trigger import transaction, trigger, trigger_many
from app.fleet.engine.once.once import once, once_many
from app.fleet.errors import (
    AlreadyActive,
    BreakerOpen,
    Fenced,
    FleetError,
    GiveUp,
    LimitReached,
    LockCycle,
    LockLost,
    LockTaken,
    PayloadInvalid,
    RunFailed,
    TryAgain,
)
from app.fleet.http.session import InSession
from app.fleet.resources.resource import resource
from app.fleet.resources.resources import Provided, provided
from app.fleet.settings import FleetSettings

__all__ = [
    "Action",
    "AlreadyActive",
    "BreakerOpen",
    "Caller",
    "Fenced",
    "FleetError",
    "FleetSettings",
    "GiveUp",
    "HeldLock",
    "InSession",
    "LimitReached",
    "LockCycle",
    "LockLost",
    "LockTaken",
    "Order",
    "PayloadInvalid",
    "Provided",
    "Run",
    "RunFailed",
    "TryAgain",
    "action",
    "breaker",
    "follow",
    "limit",
    "lock",
    "once",
    "once_many",
    "provided",
    "resource",
    "result",
    "singleton",
    "transaction",
    "trigger",
    "trigger_many",
]
