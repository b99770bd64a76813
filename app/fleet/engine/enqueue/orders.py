"""Orders: a request for one run, and its checks against the action."""

import json
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, NamedTuple

from app.fleet.engine.actions.action import PRIORITIES, Action
from app.fleet.engine.actions.catalogue import Catalogue
from app.fleet.errors import EngineError
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import RunRecord, Trigger
from app.fleet.telemetry.tracing import trace_id_of

MAX_KEY_LENGTH = 200
# Instants that PostgreSQL and Python can both represent, in any time zone.
EARLIEST_RUN_AT = datetime(1970, 1, 1, tzinfo=UTC)
LATEST_RUN_AT = datetime(9999, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Order:
    """A request for one run. Defaults: `run_at` is now, and `priority` is the action's."""

    action: str
    payload: Any = None
    key: str | None = None
    run_at: datetime | None = None
    priority: int | None = None
    ordering_key: str | None = None
    # The digest of the request, if it has an Idempotency-Key.
    digest: str | None = None


class Origin(NamedTuple):
    """What triggers runs: the code of the service, or a client (`api`), in which run, request and span."""

    trigger: Trigger
    request_id: str | None = None
    trace_parent: str | None = None
    # The run in whose attempt the code triggers them.
    triggered_by: int | None = None


class Prepared(NamedTuple):
    """An order that has passed the checks."""

    order: Order
    action: Action[Any]
    action_id: int
    payload: str | None
    # The run's id, if it was drawn before the insert.
    id: int | None = None

    @property
    def priority(self) -> int:
        return self.action.priority if self.order.priority is None else self.order.priority

    @property
    def is_one_statement(self) -> bool:
        """Whether one statement inserts the run."""
        return self.order.key is None and self.action.overlap != "skip"

    def record(self, identifier: int, run_at: datetime, created_at: datetime, origin: Origin) -> RunRecord:
        return RunRecord(
            id=identifier,
            action=self.action.name,
            state=RunState.PENDING,
            trigger=origin.trigger,
            payload={} if self.payload is None else json.loads(self.payload),
            scheduled_for=None,
            run_at=run_at,
            ordering_key=self.order.ordering_key,
            attempt=0,
            max_attempts=self.action.max_attempts,
            instance=None,
            result=None,
            error=None,
            progress=None,
            triggered_by=origin.triggered_by,
            request_id=origin.request_id,
            trace_id=trace_id_of(origin.trace_parent),
            created_at=created_at,
            started_at=None,
            finished_at=None,
        )


def prepare(catalogue: Catalogue, order: Order) -> Prepared:
    """Check an order against its action."""
    action = catalogue[order.action]
    if not is_key(order.key):
        raise EngineError(f"a key must have from 1 to {MAX_KEY_LENGTH} printable characters")
    if not is_key(order.ordering_key):
        raise EngineError(f"an ordering_key must have from 1 to {MAX_KEY_LENGTH} printable characters")
    if order.priority is not None and order.priority not in PRIORITIES:
        raise EngineError(f"a priority must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")
    if order.run_at is not None and order.run_at.tzinfo is None:
        raise EngineError("run_at needs a time zone: PostgreSQL's clock and yours may be in different ones")
    if order.run_at is not None and not EARLIEST_RUN_AT <= order.run_at <= LATEST_RUN_AT:
        raise EngineError(f"run_at must be between the years {EARLIEST_RUN_AT.year} and {LATEST_RUN_AT.year}")
    if order.run_at is not None:
        # PostgreSQL does not accept offsets of 16 hours or more.
        order = replace(order, run_at=order.run_at.astimezone(UTC))
    return Prepared(order, action, catalogue.id_of(order.action), action.encode(order.payload))


def is_key(text: str | None) -> bool:
    return text is None or (isinstance(text, str) and 0 < len(text) <= MAX_KEY_LENGTH and text.isprintable())
