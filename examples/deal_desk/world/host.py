"""The process that runs the world: an instance of the desk, as a singleton, or a separate process.

As a singleton it moves to another instance when its instance dies; its file keeps the record. The move is a short
outage of all upstreams, which the desk must survive anyway. The file and the address belong to one machine: for
instances on several machines, start `python -m examples.deal_desk world` on one of them, and set `DESK_WORLD_URL` of
all instances to its address. The singleton then does nothing.
"""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import uvicorn

from app.fleet import HeldLock, singleton
from examples.deal_desk.settings import World, world
from examples.deal_desk.world.app import Upstreams, create_world
from examples.deal_desk.world.appearing import Publisher
from examples.deal_desk.world.record import Record


class EmbeddedServer(uvicorn.Server):
    """A server within the process of another server, which handles the signals."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@singleton("deal-desk-world")
async def host_world(_: HeldLock) -> None:
    if world.url is not None:
        # The world runs elsewhere. If this returned, the singleton would be started again.
        await asyncio.Event().wait()
    await run_world(world)


async def run_world(settings: World) -> None:
    """Run the upstreams until this is cancelled."""
    # Bound here, so that a port in use raises an error that the singleton can handle.
    listener = socket.create_server(("127.0.0.1", settings.port))
    with listener, closing(Record(settings.file)) as record:
        upstreams = Upstreams(record, settings)
        config = uvicorn.Config(create_world(upstreams), log_config=None, access_log=False, lifespan="off")
        server = EmbeddedServer(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await publish(upstreams, settings)
        finally:
            # Requests in progress are aborted, as in an outage of an upstream.
            server.should_exit = server.force_exit = True
            await serving


async def publish(upstreams: Upstreams, settings: World) -> None:
    publisher = Publisher(upstreams.record, settings.bunch)
    while True:
        if not upstreams.quiet:
            publisher.publish()
        await asyncio.sleep(settings.every)
