"""Request bodies and response bodies of the routes that create runs, one by one or in batches.

A body is parsed here and not by FastAPI: one compiled validator checks a thousand runs directly from the bytes, and
another serialises them. An invalid body is refused before anything is written, with the name of each invalid field:
`priority`, `payload.weight`, `runs.3.payload.weight`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.fleet.edge.context import Context
from app.fleet.edge.elsewhere import action_missing_here
from app.fleet.edge.problems import NotFound, Unavailable, listed
from app.fleet.engine.actions.action import PRIORITIES
from app.fleet.engine.enqueue.insert import Triggered
from app.fleet.engine.enqueue.orders import Order
from app.fleet.errors import FleetError, PayloadInvalid, RunUnknown
from app.fleet.http.fields import Instant, Key, Payload
from app.fleet.runs.read import records as runs
from app.fleet.runs.read.records import RunRecord
from app.fleet.validation import MAX_LISTED_ERRORS, invalid_parts

MAX_RUNS = 1000
JSON = "Content-Type: application/json"

Answer = TypeVar("Answer")
Body = TypeVar("Body", bound=BaseModel)


class NewRun(BaseModel):
    """The order of one run. By default it runs now, with the priority of its action, and unordered."""

    model_config = ConfigDict(extra="forbid", strict=True)

    payload: Payload = None
    key: Key | None = None
    run_at: Instant | None = None
    priority: Annotated[int, Field(ge=PRIORITIES[0], le=PRIORITIES[-1])] | None = None
    ordering_key: Key | None = None

    def order(self, action: str) -> Order:
        return Order(action, self.payload, self.key, self.run_at, self.priority, self.ordering_key)


class BatchedRun(NewRun):
    action: str


class NewRuns(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    runs: Annotated[list[BatchedRun], Field(min_length=1, max_length=MAX_RUNS)]

    def orders(self) -> list[Order]:
        return [each.order(each.action) for each in self.runs]


NEW_RUN = TypeAdapter(NewRun)
NEW_RUNS = TypeAdapter(NewRuns)
RUN = TypeAdapter(RunRecord)


async def read(request: Request, adapter: TypeAdapter[Body]) -> Body:
    """Parse the body of a request; an empty body counts as an empty object."""
    content = await request.body()
    # A page of another site can make a browser send any other media type, or none, without a preflight request.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content and media_type != "application/json":
        raise HTTPException(
            415, f"this path accepts JSON, not {media_type or 'a body without a media type'}: send `{JSON}`"
        )
    try:
        return adapter.validate_json(content or b"{}")
    except ValidationError as error:
        parts = [{"loc": ("body", *part.location), "msg": part.message} for part in invalid_parts(error)]
        raise RequestValidationError(parts) from None


def answer(adapter: TypeAdapter[Answer], value: Answer, status: int = 200, **headers: str) -> Response:
    """Return a response. FastAPI would copy and validate the value once more."""
    return Response(adapter.dump_json(value), status, headers, "application/json")


async def records(context: Context, triggered: Sequence[Triggered]) -> list[RunRecord]:
    """Return the records of these runs: new ones as they were inserted, existing ones as they are now."""
    inserted = [each.record() for each in triggered]
    existing = [each.id for each, record in zip(triggered, inserted, strict=True) if record is None]
    found = {}
    if existing:
        async with context.database.connection() as connection:
            found = {run.id: run for run in await runs.find_all(connection, context.database.namespace, existing)}
    complete = [record or found.get(each.id) for each, record in zip(triggered, inserted, strict=True)]
    if None in complete:
        raise RunUnknown(
            "the run of this key ended long ago and has just been deleted: send the request again for a new run"
        )
    return [run for run in complete if run is not None]


async def actions_missing_here(context: Context, orders: Sequence[Order]) -> FleetError:
    """Return the error for a batch with actions that are not in this instance's code."""
    unknown = {number: each.action for number, each in enumerate(orders) if each.action not in context.engine.catalogue}
    for name in sorted(set(unknown.values())):
        if isinstance(elsewhere := await action_missing_here(context, name), Unavailable):
            return elsewhere
    errors = [
        {"field": f"runs.{number}.action", "message": f"there is no action {name!r}"}
        for number, name in unknown.items()
    ]
    return NotFound(f"{listed(errors)}. GET /actions lists the existing actions", errors=errors)


def invalid_payloads(context: Context, orders: Sequence[Order]) -> PayloadInvalid:
    """Return the error for a batch with invalid payloads."""
    errors: list[Mapping[str, Any]] = []
    for number, order in enumerate(orders):
        try:
            context.engine.catalogue[order.action].encode(order.payload)
        except PayloadInvalid as error:
            parts = error.errors or [{"field": "payload", "message": str(error)}]
            errors += [{**part, "field": f"runs.{number}.{part['field']}"} for part in parts]
        if len(errors) > MAX_LISTED_ERRORS:
            break
    return PayloadInvalid(f"payloads are invalid for their actions: {listed(errors)}", errors)
