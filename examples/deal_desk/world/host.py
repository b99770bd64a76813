"""Who runs the world: one of the desk's instances, as a singleton, or a process of its own.

As a singleton it is on one instance, and on another a moment after that one has died; what has reached it until then is
in its file. That moment is an outage of all upstreams at once, which is something a desk has to live with anyhow. The
file and the address are of one machine: for instances on several, start `python -m examples.deal_desk world` on one and
give its address to all, as `DESK_WORLD_URL`. The singleton does nothing then.
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


class Guest(uvicorn.Server):
    """A server inside of somebody else's process: signals are not its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@singleton("deal-desk-world")
async def host_world(_: HeldLock) -> None:
    if world.url is not None:
        # Somebody else has it. Whoever returned would have another turn.
        await asyncio.Event().wait()
    await run_world(world)


async def run_world(settings: World) -> None:
    """Run the upstreams until this is cancelled."""
    # Bound here: a port in use is an error that can be caught, and waited for.
    listener = socket.create_server(("127.0.0.1", settings.port))
    with listener, closing(Record(settings.file)) as record:
        upstreams = Upstreams(record, settings)
        config = uvicorn.Config(create_world(upstreams), log_config=None, access_log=False, lifespan="off")
        server = Guest(config)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            await publish(upstreams, settings)
        finally:
            # Who is in the middle of a request has lost an upstream, as happens.
            server.should_exit = server.force_exit = True
            await serving


async def publish(upstreams: Upstreams, settings: World) -> None:
    publisher = Publisher(upstreams.record, settings.bunch)
    while True:
        if not upstreams.quiet:
            publisher.publish()
        await asyncio.sleep(settings.every)
