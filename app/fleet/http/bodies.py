"""Bodies become orders, orders become runs, and runs become answers: what single runs and batches have in common.

A body is read here and not by the framework: a thousand runs are checked by one compiled validator straight from the
bytes, and written by another. What does not fit is refused before anything is written, with the name of each field
that is wrong: `priority`, `payload.weight`, `runs.3.payload.weight`.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from app.fleet.engine.actions import admin
from app.fleet.engine.actions.action import PRIORITIES
from app.fleet.engine.enqueue.trigger import Order, Triggered
from app.fleet.errors import ActionUnknown, FleetError, PayloadInvalid, RunUnknown
from app.fleet.http.edge.context import Context
from app.fleet.http.edge.problems import NotFound, Unavailable, listed
from app.fleet.http.fields import Instant, Key, Payload
from app.fleet.runs import records as runs
from app.fleet.runs.records import RunRecord
from app.fleet.validation import MAX_LISTED_ERRORS, invalid_parts

MOST = 1000
JSON = "Content-Type: application/json"

Answer = TypeVar("Answer")
Body = TypeVar("Body", bound=BaseModel)


class NewRun(BaseModel):
    """One run that is wanted. Without `run_at`: now; `priority`: the action's own; `ordering_key`: in no line."""

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

    runs: Annotated[list[BatchedRun], Field(min_length=1, max_length=MOST)]

    def orders(self) -> list[Order]:
        return [each.order(each.action) for each in self.runs]


NEW_RUN = TypeAdapter(NewRun)
NEW_RUNS = TypeAdapter(NewRuns)
RUN = TypeAdapter(RunRecord)


def described(model: type[BaseModel], **parts: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that is read here, for the pages of the schema."""
    schema = model.model_json_schema()
    schema.pop("$defs", None)
    for name, part in parts.items():
        schema["properties"][name]["items"] = part.model_json_schema()
    return {"requestBody": {"content": {"application/json": {"schema": schema}}}}


async def read(request: Request, adapter: TypeAdapter[Body]) -> Body:
    """Read a body; no body at all is an empty object."""
    content = await request.body()
    # A page of another site can have a browser send any other type, or none, without asking this service first.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content and media_type != "application/json":
        raise HTTPException(415, f"this path reads JSON, not {media_type or 'a body without a type'}: send `{JSON}`")
    try:
        return adapter.validate_json(content or b"{}")
    except ValidationError as error:
        parts = [{"loc": ("body", *part.location), "msg": part.message} for part in invalid_parts(error)]
        raise RequestValidationError(parts) from None


def answer(adapter: TypeAdapter[Answer], value: Answer, status: int = 200, **headers: str) -> Response:
    """Write an answer, past the framework's own copying and checking of what has a type already."""
    return Response(adapter.dump_json(value), status, headers, "application/json")


async def records(context: Context, triggered: Sequence[Triggered]) -> list[RunRecord]:
    """Return these runs: new ones as they were inserted, earlier ones as they are now."""
    inserted = [each.record("api") for each in triggered]
    earlier = [each.id for each, record in zip(triggered, inserted, strict=True) if record is None]
    found = {}
    if earlier:
        async with context.database.connection() as connection:
            found = {run.id: run for run in await runs.find_all(connection, context.database.namespace, earlier)}
    made = [record or found.get(each.id) for each, record in zip(triggered, inserted, strict=True)]
    if None in made:
        raise RunUnknown(
            "the run of this key ended so long ago that it was just forgotten: send it again for a new one"
        )
    return [run for run in made if run is not None]


async def not_here(context: Context, name: str) -> FleetError:
    """Say why an action that our code does not have cannot be triggered here: others have it, or nobody."""
    async with context.database.connection() as connection:
        try:
            found = await admin.find(connection, context.database.namespace, context.engine.catalogue, name)
        except ActionUnknown as unknown:
            return unknown
    if found.state == "vanished":
        return ActionUnknown(f"no living instance has the action {name!r} in its code any more")
    return Unavailable(
        f"this instance's release does not have the action {name!r}, and another's does: send it again shortly, or to "
        f"one of {', '.join(found.standby[:3])}",
        retry_after=2,
    )


async def not_these(context: Context, orders: Sequence[Order]) -> FleetError:
    """Say of a batch which of its runs are of actions that our code does not have."""
    unknown = {number: each.action for number, each in enumerate(orders) if each.action not in context.engine.catalogue}
    for name in sorted(set(unknown.values())):
        if isinstance(elsewhere := await not_here(context, name), Unavailable):
            return elsewhere
    errors = [
        {"field": f"runs.{number}.action", "message": f"there is no action {name!r}"}
        for number, name in unknown.items()
    ]
    return NotFound(f"{listed(errors)}. GET /actions lists those there are", errors=errors)


def misfits(context: Context, orders: Sequence[Order]) -> PayloadInvalid:
    """Say of a batch which payloads do not fit."""
    errors: list[Mapping[str, Any]] = []
    for number, order in enumerate(orders):
        try:
            context.engine.catalogue[order.action].encode(order.payload)
        except PayloadInvalid as wrong:
            parts = wrong.errors or [{"field": "payload", "message": str(wrong)}]
            errors += [{**part, "field": f"runs.{number}.{part['field']}"} for part in parts]
        if len(errors) > MAX_LISTED_ERRORS:
            break
    return PayloadInvalid(f"payloads do not fit their actions: {listed(errors)}", errors)
