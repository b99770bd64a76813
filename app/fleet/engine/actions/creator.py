"""The service in which code runs, as far as it creates runs: what `Action.trigger` and `trigger` use.

`Engine.enter` sets it at the start of the service, for each request and for each attempt.
"""

from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol

from app.fleet.db.pool.statements import Place
from app.fleet.errors import FleetError


class RunCreator(Protocol):
    """Creates runs of one service's actions. `engine/enqueue/trigger.py` implements it."""

    async def create(
        self,
        action: str,
        payload: Any,
        key: str | None,
        run_at: datetime | None,
        priority: int | None,
        ordering_key: str | None,
        session: Place | None,
    ) -> int: ...


current: ContextVar[RunCreator] = ContextVar("flotilla_run_creator")


def current_creator() -> RunCreator:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "trigger() and transaction() are for the code of a running service: a route, or an action. Elsewhere, use "
            "the REST API or `flotilla trigger`"
        ) from None
