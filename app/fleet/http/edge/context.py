"""What a request can reach: the settings, and the services once they have started."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends, Request

from app.fleet.cluster.member import Member
from app.fleet.coordination.coordination import Coordination
from app.fleet.db.pool import Database
from app.fleet.engine.engine import Engine
from app.fleet.errors import FleetError
from app.fleet.http.edge.problems import Unavailable
from app.fleet.http.edge.readiness import Readiness
from app.fleet.http.edge.refused_keys import RefusedKeys
from app.fleet.lifecycle import Lifecycle
from app.fleet.server.connections import Connections
from app.fleet.settings import FleetSettings
from app.fleet.stream.pacer import Pacer
from app.fleet.stream.stream import Stream

OPENINGS = 4


@dataclass
class Context:
    settings: FleetSettings
    version: str
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    in_flight: int = 0
    # Requests whose client left before the whole body had arrived.
    abandoned: int = 0
    # Of streams that many clients open at once, a few go on in each turn of the event loop.
    openings: Pacer = field(init=False)
    # How many streams are open, by the key that opened them.
    open_streams: Counter[str | None] = field(default_factory=Counter)
    refused_keys: RefusedKeys = field(default_factory=RefusedKeys)
    # Why the start was refused, if it was.
    refused: FleetError | None = None
    shutdown_seconds: dict[str, float] = field(default_factory=dict)
    connections: Connections = field(init=False)
    _database: Database | None = None
    _member: Member | None = None
    _engine: Engine | None = None
    _stream: Stream | None = None
    _shared: Coordination | None = None
    _readiness: Readiness | None = None

    def __post_init__(self) -> None:
        self.connections = Connections(self.settings)
        # New connections go first: the event loop accepts one in each turn, and it may be a probe's.
        self.openings = Pacer(OPENINGS, self.connections.were_accepted)

    def started(self, database: Database, member: Member, shared: Coordination, stream: Stream, engine: Engine) -> None:
        self._database, self._member, self._shared = database, member, shared
        self._stream, self._engine = stream, engine
        self._readiness = Readiness(database, member)

    @property
    def database(self) -> Database:
        if self._database is None:
            raise Unavailable("this instance is still starting")
        return self._database

    @property
    def member(self) -> Member:
        if self._member is None:
            raise Unavailable("this instance is still starting")
        return self._member

    @property
    def shared(self) -> Coordination:
        if self._shared is None:
            raise Unavailable("this instance is still starting")
        return self._shared

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise Unavailable("this instance is still starting")
        return self._engine

    @property
    def stream(self) -> Stream:
        if self._stream is None:
            raise Unavailable("this instance is still starting")
        return self._stream

    @property
    def readiness(self) -> Readiness:
        if self._readiness is None:
            raise Unavailable("this instance is still starting")
        return self._readiness


async def context_of(request: Request) -> Context:
    # A coroutine, because FastAPI calls any other dependency in a thread, which every request would wait for.
    context = request.app.state.fleet
    assert isinstance(context, Context)
    return context


InContext = Annotated[Context, Depends(context_of)]
