"""Actions: functions that the service can run, with their options.

    @action("feed-monitor", every="60s", overlap="skip", timeout="5m")
    async def feed_monitor(run: Run) -> None: ...

The decorator checks the options at import time, so a service with an invalid action does not start. The catalogue finds
the actions (`catalogue.py`).

An action can be called like its function, so it can be tested without an engine. `Action.trigger` creates a run in the
service whose code calls it (`creator.py`).
"""

import inspect
import math
import re
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, cast

import pydantic_core
from pydantic import TypeAdapter, ValidationError

from app.fleet.db.pool.statements import Place
from app.fleet.db.stored_json import why_unreadable
from app.fleet.duration import MAX_DURATION, Duration, Rate, format_duration, parse_duration
from app.fleet.engine.actions.creator import current_creator
from app.fleet.engine.actions.run import P, Run
from app.fleet.engine.actions.schedule import Misfire, Overlap, Schedule
from app.fleet.errors import ActionInvalid, PayloadInvalid
from app.fleet.validation import invalid_parts

Handler = Callable[[Any], Any]

NAME = re.compile(r"[a-z][a-z0-9._-]{0,99}")
PRIORITIES = range(-1000, 1001)
# In characters of JSON.
MAX_PAYLOAD = 1_048_576


@dataclass(frozen=True)
class Action(Generic[P]):
    """A named function and its options, created by `@action`."""

    name: str
    handler: Handler
    payload_type: Any = dict[str, Any]
    schedule: Schedule | None = None
    misfire: Misfire = "once"
    overlap: Overlap = "allow"
    retries: int = 3
    retry_delay: float = 1.0
    max_retry_delay: float = 600.0
    timeout: float = 3600.0
    concurrency: int | None = None
    rate: Rate | None = None
    priority: int = 0
    retention: float = 7 * 86400.0
    summary: str = ""
    blocking: bool = False
    adapter: TypeAdapter[Any] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "adapter", TypeAdapter(self.payload_type))

    def __call__(self, run: Run[P]) -> Any:
        return self.handler(run)

    async def trigger(
        self,
        payload: P | None = None,
        *,
        key: str | None = None,
        run_at: datetime | None = None,
        priority: int | None = None,
        ordering_key: str | None = None,
        session: Place | None = None,
    ) -> int:
        """Create a run; return its id. With `session`, the run exists exactly if that transaction commits."""
        return await current_creator().create(self.name, payload, key, run_at, priority, ordering_key, session)

    @property
    def location(self) -> str:
        return f"{self.handler.__module__}.{self.handler.__qualname__}"

    @property
    def max_attempts(self) -> int:
        return self.retries + 1

    @property
    def limited(self) -> bool:
        """Whether a limit for the whole cluster applies: on running runs, or on starts."""
        return self.max_running is not None or self.rate is not None

    @property
    def max_running(self) -> int | None:
        """The maximum of running runs in the whole cluster; 1 with `overlap="queue"`."""
        return 1 if self.overlap == "queue" else self.concurrency

    @property
    def plain(self) -> bool:
        """Whether the payload may be any JSON object."""
        return bool(self.payload_type == dict[str, Any])

    def encode(self, payload: Any) -> str | None:
        """Check a payload against the action's type and return it as JSON; None if it is empty."""
        if self.plain and (payload is None or payload == {}):
            return None
        try:
            value = {} if payload is None else payload
            if self.plain and not isinstance(value, dict):
                value = pydantic_core.to_jsonable_python(value)
            checked = self.adapter.validate_python(value)
            text = self.adapter.dump_json(checked, by_alias=True).decode()
            if "null" in text and has_nan_or_infinity(self.adapter.dump_python(checked, by_alias=True)):
                raise PayloadInvalid(f"the payload of {self.name!r} has a number that JSON lacks: NaN or infinity")
        except ValidationError as error:
            raise payload_invalid(self.name, error) from None
        except (pydantic_core.PydanticSerializationError, UnicodeError, RecursionError) as error:
            raise PayloadInvalid(f"the payload of {self.name!r} cannot be written as JSON: {error}") from None
        if len(text) > MAX_PAYLOAD:
            raise PayloadInvalid(
                f"the payload of {self.name!r} is {len(text)} characters of JSON, and may have {MAX_PAYLOAD}: keep it "
                f"elsewhere, and a key here"
            )
        if why := why_unreadable(text):
            raise PayloadInvalid(f"the payload of {self.name!r} cannot be stored as JSON: {why}")
        return None if text == "{}" else text

    def decode(self, text: str | None) -> P:
        try:
            return cast("P", self.adapter.validate_json(text or "{}"))
        except ValidationError as error:
            raise payload_invalid(self.name, error) from None


def has_nan_or_infinity(value: Any) -> bool:
    """pydantic would write NaN and infinity as null."""
    if isinstance(value, dict):
        return any(has_nan_or_infinity(each) for each in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(has_nan_or_infinity(each) for each in value)
    return isinstance(value, float) and not math.isfinite(value)


def payload_invalid(name: str, error: ValidationError) -> PayloadInvalid:
    """Return the error with the names of the invalid fields, but without their values."""
    errors = [
        {"field": ".".join(["payload", *(str(step) for step in part.location)]), "message": part.message}
        for part in invalid_parts(error)
    ]
    text = "; ".join(f"{each['field']}: {each['message']}" for each in errors[:3])
    return PayloadInvalid(f"the payload does not fit the action {name!r}: {text}", errors)


# -- the decorator ----------------------------------------------------------------------------------------------------

AsyncHandler = Callable[[Run[P]], Awaitable[Any]]
AnyHandler = AsyncHandler[P] | Callable[[Run[P]], Any]


def action(
    name: str,
    *,
    every: Duration | None = None,
    cron: str | None = None,
    timezone: str = "UTC",
    jitter: Duration | None = None,
    misfire: Misfire = "once",
    overlap: Overlap = "allow",
    retries: int = 3,
    retry_delay: Duration = "1s",
    max_retry_delay: Duration = "10m",
    timeout: Duration = "1h",
    concurrency: int | None = None,
    rate: str | None = None,
    burst: int | None = None,
    priority: int = 0,
    retention: Duration = "7d",
) -> Callable[[AnyHandler[P]], Action[P]]:
    """Declare a function as an action of the service. docs/reference/actions.md describes the options."""

    def declare(handler: AnyHandler[P]) -> Action[P]:
        try:
            check(name, misfire, overlap, retries, concurrency, priority)
            declared: Action[P] = Action(
                name=name,
                handler=handler,
                payload_type=payload_type(handler),
                schedule=Schedule.of(every, cron, timezone, jitter),
                misfire=misfire,
                overlap=overlap,
                retries=retries,
                retry_delay=positive("retry_delay", retry_delay),
                max_retry_delay=positive("max_retry_delay", max_retry_delay),
                timeout=positive("timeout", timeout),
                concurrency=concurrency,
                rate=rate_of(rate, burst),
                priority=priority,
                retention=positive("retention", retention),
                summary=(inspect.getdoc(handler) or "").partition("\n")[0],
                blocking=not inspect.iscoroutinefunction(handler),
            )
            if declared.schedule is not None:
                check_without_payload(declared)
        except ValueError as error:
            location = f"{handler.__module__}.{handler.__qualname__}"
            raise ActionInvalid(f"the action {name!r} ({location}) is declared wrongly: {error}") from error
        return declared

    return declare


def check(name: str, misfire: Misfire, overlap: Overlap, retries: int, concurrency: int | None, priority: int) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(
            "a name is a lower-case letter, then up to 99 lower-case letters, digits, dots, hyphens and underscores"
        )
    for option, value, allowed in (
        ("misfire", misfire, typing.get_args(Misfire)),
        ("overlap", overlap, typing.get_args(Overlap)),
    ):
        if value not in allowed:
            raise ValueError(f"`{option}` is {value!r}, and must be one of {', '.join(map(repr, allowed))}")
    if not isinstance(retries, int) or not 0 <= retries <= 1000:
        raise ValueError(f"`retries` is {retries!r}, and must be from 0 to 1000")
    if concurrency is not None and (not isinstance(concurrency, int) or concurrency < 1):
        raise ValueError(f"`concurrency` is {concurrency!r}, and must be 1 or more; to stop an action, pause it")
    if not isinstance(priority, int) or priority not in PRIORITIES:
        raise ValueError(f"`priority` is {priority!r}, and must be from {PRIORITIES[0]} to {PRIORITIES[-1]}")


def rate_of(rate: str | None, burst: int | None) -> Rate | None:
    if rate is not None:
        return Rate.parse(rate, 1 if burst is None else burst)
    if burst is not None:
        raise ValueError(f"`burst` is {burst!r}, and there is no `rate`: give both, or neither")
    return None


def check_without_payload(declared: Action[Any]) -> None:
    try:
        declared.encode(None)
    except PayloadInvalid as error:
        raise ValueError(f"on a schedule it is given no payload, so each field needs a default: {error}") from None


def positive(option: str, duration: Duration) -> float:
    try:
        value = parse_duration(duration)
    except ValueError as error:
        raise ValueError(f"`{option}`: {error}") from error
    if not 0 < value <= MAX_DURATION:
        raise ValueError(
            f"`{option}` is {value:g} s, and must be more than 0 and at most {format_duration(MAX_DURATION)}"
        )
    return value


def payload_type(handler: Handler) -> Any:
    """Return the payload's type from the annotation `Run[Filing]`; `Run` alone means any JSON object."""
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise ValueError("an action cannot be a generator: use `run.emit` to report progress")
    parameters = list(inspect.signature(handler).parameters.values())
    if len([each for each in parameters if each.default is each.empty]) != 1:
        raise ValueError("an action takes one argument, the run: `async def name(run: Run) -> None`")
    try:
        hints = typing.get_type_hints(handler)
    except NameError as error:
        raise ValueError(f"its annotations cannot be read: {error}") from error
    annotation = hints.get(parameters[0].name, Run)
    if annotation is Run or annotation is inspect.Parameter.empty:
        return dict[str, Any]
    if typing.get_origin(annotation) is not Run:
        raise ValueError(f"its argument is a `Run` or a `Run[Payload]`, and not {annotation!r}")
    return typing.get_args(annotation)[0]
