"""The context of all requests: the settings, and the services of this instance as soon as they have started."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from typing import Annotated, Any

from fastapi import Depends, Request

from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db.pool.pool import Database
from app.fleet.edge.callers.caller import SignIn
from app.fleet.edge.callers.refused_keys import RefusedKeys
from app.fleet.edge.problems import Unavailable
from app.fleet.edge.readiness import Readiness
from app.fleet.engine.engine import Engine
from app.fleet.errors import FleetError, SettingsError
from app.fleet.lifecycle import Lifecycle
from app.fleet.resources.resource import Resource
from app.fleet.resources.resources import Resources
from app.fleet.server.connections import Connections
from app.fleet.settings import FleetSettings
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.stream import Stream

OPENED_PER_ITERATION = 4


@dataclass(frozen=True)
class Services:
    """The services of one instance, in the order in which they depend on each other."""

    database: Database
    member: Member
    coordination: Coordination
    stream: Stream
    engine: Engine


@dataclass
class Context:
    settings: FleetSettings
    version: str
    # What `app/startup.py` declares.
    declared: InitVar[Sequence[Resource[Any]]] = ()
    # The service's own sign-in; None: API keys.
    sign_in: SignIn | None = None
    resources: Resources = field(init=False)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    in_flight: int = 0
    # Requests whose client left before the whole body had arrived.
    abandoned: int = 0
    # When many clients open streams at once, each iteration of the event loop opens a few.
    opening_pacer: Pacer = field(init=False)
    # The number of open streams, by the name of the caller that opened them.
    open_streams: Counter[str | None] = field(default_factory=Counter)
    refused_keys: RefusedKeys = field(default_factory=RefusedKeys)
    # Why the start was refused, if it was.
    start_error: FleetError | None = None
    shutdown_seconds: dict[str, float] = field(default_factory=dict)
    connections: Connections = field(init=False)
    _services: Services | None = None

    def __post_init__(self, declared: Sequence[Resource[Any]]) -> None:
        if self.settings.production and not self.protected:
            raise SettingsError(
                "API_KEYS is not set, and ENVIRONMENT is 'production': all callers could read and operate this "
                "service. Make a key with `flotilla key NAME --scope admin`, and set FLOTILLA_API_KEYS to the line "
                "that it prints; or write a sign-in of your own (docs/guides/sign-in.md)"
            )
        self.resources = Resources(self.settings, declared)
        self.connections = Connections(self.settings)
        # New connections go first: the event loop accepts one in each iteration, and it may be a probe's.
        self.opening_pacer = Pacer(OPENED_PER_ITERATION, self.connections.were_accepted)

    def start(self, services: Services) -> None:
        """Let requests use these services."""
        self._services = services

    def enter(self) -> None:
        """Make the public functions mean this instance, in this task and in the tasks that it starts."""
        self.engine.enter()
        self.resources.enter()

    @property
    def protected(self) -> bool:
        """Whether callers must prove who they are."""
        return bool(self.settings.api_keys) or self.sign_in is not None

    @property
    def started(self) -> bool:
        return self._services is not None

    @property
    def services(self) -> Services:
        if self._services is None:
            raise Unavailable("this instance is still starting: try again shortly, or at another instance")
        return self._services

    @property
    def database(self) -> Database:
        return self.services.database

    @property
    def member(self) -> Member:
        return self.services.member

    @property
    def coordination(self) -> Coordination:
        return self.services.coordination

    @property
    def stream(self) -> Stream:
        return self.services.stream

    @property
    def engine(self) -> Engine:
        return self.services.engine

    @cached_property
    def readiness(self) -> Readiness:
        return Readiness(self.database, self.member)


async def context_of(request: Request) -> Context:
    # A coroutine: FastAPI calls other dependencies in a thread, for which every request would wait.
    context = request.app.state.fleet
    assert isinstance(context, Context)
    return context


InContext = Annotated[Context, Depends(context_of)]
