"""The peers, each in its own process: `python -m benchmarks.peers NAME ADDRESS JOBS WIDTH CONNECTIONS`.

They use their public interfaces in the fastest way that their documentation shows: PgQueuer on asyncpg and uvloop, with
its autovacuum settings and no tracing; Procrastinate on its psycopg pool and uvloop, without polling. Both have their
default durability. As for us, the jobs are inserted first, then all tables are vacuumed and a checkpoint is made. The
clock runs from the start of the worker until it has found its queue empty, has written everything and returns.

The last line of the output is the rate.
"""

import asyncio
import importlib.util
import sys
import time
from typing import Any

import psycopg
import uvloop

AT_ONCE = 1000


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("asyncpg", "pgqueuer", "procrastinate"))


async def pgqueuer(address: str, jobs: int, batch: int, connections: int) -> float:
    """Burn down a backlog with one worker per connection."""
    import asyncpg
    from pgqueuer import AsyncpgDriver, PgQueuer, Queries
    from pgqueuer.domain.types import QueueExecutionMode

    drivers = [AsyncpgDriver(await asyncpg.connect(address)) for _ in range(connections)]
    queries = Queries(drivers[0])
    if not await queries.schema_is_installed():
        await queries.install()
        await queries.optimize_autovacuum()
    for _ in range(jobs // AT_ONCE):
        await queries.enqueue(["noop"] * AT_ONCE, [None] * AT_ONCE, [0] * AT_ONCE)
    await settle(address)
    workers = [PgQueuer(driver) for driver in drivers]
    for worker in workers:
        worker.entrypoint("noop")(noop)
    began = time.perf_counter()
    await asyncio.gather(*(each.run(batch_size=batch, mode=QueueExecutionMode.drain) for each in workers))
    return jobs / (time.perf_counter() - began)


async def procrastinate(address: str, jobs: int, concurrency: int, connections: int) -> float:
    """Burn down a backlog with one worker that has this concurrency."""
    from procrastinate import App, PsycopgConnector

    app = App(connector=PsycopgConnector(conninfo=address, min_size=connections, max_size=connections))
    task = app.task(name="noop")(nothing)
    async with app.open_async():
        async with await psycopg.AsyncConnection.connect(address) as connection:
            table = await (await connection.execute("SELECT to_regclass('procrastinate_jobs')")).fetchone()
        if table == (None,):
            await app.schema_manager.apply_schema_async()
        await task.batch_defer_async(*[{}] * jobs)
        await settle(address)
        began = time.perf_counter()
        await app.run_worker_async(
            wait=False, concurrency=concurrency, install_signal_handlers=False, listen_notify=False
        )
        return jobs / (time.perf_counter() - began)


async def noop(_job: Any) -> None: ...


async def nothing() -> None: ...


async def settle(address: str) -> None:
    async with await psycopg.AsyncConnection.connect(address, autocommit=True) as connection:
        await connection.execute("VACUUM ANALYZE")
        await connection.execute("CHECKPOINT")


def main() -> None:
    name, address, *numbers = sys.argv[1:]
    jobs, width, connections = map(int, numbers)
    peer = {"pgqueuer": pgqueuer, "procrastinate": procrastinate}[name]
    print(uvloop.run(peer(address, jobs, width, connections)))


if __name__ == "__main__":
    main()
