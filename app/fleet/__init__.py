"""What makes N instances of one service safe, on PostgreSQL alone.

This page is the public API. A service author imports from here; everything below may change.
"""

from app.fleet.engine.actions import Action, action
from app.fleet.engine.following import follow, result
from app.fleet.engine.run import Run
from app.fleet.engine.trigger import Order, session, trigger, trigger_many
from app.fleet.errors import AlreadyActive, Fenced, FleetError, GiveUp, PayloadInvalid, RunFailed, TryAgain
from app.fleet.http.session import InSession
from app.fleet.settings import FleetSettings

__all__ = [
    "Action",
    "AlreadyActive",
    "Fenced",
    "FleetError",
    "FleetSettings",
    "GiveUp",
    "InSession",
    "Order",
    "PayloadInvalid",
    "Run",
    "RunFailed",
    "TryAgain",
    "action",
    "follow",
    "result",
    "session",
    "trigger",
    "trigger_many",
]
