"""How fast `once` processes keys: new keys a thousand at a time, new keys one at a time, and keys already seen.

A service runs in this process, with uvloop. Two tasks enter blocks with 1,000 new keys and leave them at once, which
makes the keys seen; a key is counted once for both steps. Sixteen tasks do the same key by key. Then the batches are
repeated, as with a feed that has hardly changed: no key is fresh, and nothing is written. All keys are counted at the
end.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

import psycopg
import uvloop

from app.fleet import once, once_many
from benchmarks.conditions import ACTIONS, durable_server
from benchmarks.report import rates
from tests.support.service import service

ROUNDS = 5
BATCH = 1000
BATCHES = 200
MIN_RATE = 50_000
TASKS = 2
SINGLES = 5000
SINGLE_TASKS = 16


def run(*, short: bool) -> None:
    rounds, share = (1, 0.1) if short else (ROUNDS, 1.0)
    with durable_server() as postgres:
        address = postgres.new_database()
        batches, singles, again = uvloop.run(measured(address, rounds, int(BATCHES * share), int(SINGLES * share)))
        check(address, rounds * (int(BATCHES * share) * BATCH + int(SINGLES * share)))
    print(f"{'':<46} keys/s in each of {rounds} rounds")
    print(rates("once_many, 1,000 each, two tasks", batches, least=MIN_RATE))
    print(rates("once, sixteen tasks", singles))
    print(rates("once_many, all of them seen before", again))


async def measured(
    address: str, rounds: int, batches: int, singles: int
) -> tuple[list[float], list[float], list[float]]:
    in_batches, one_by_one, again = [], [], []
    async with service(address, actions=(ACTIONS,), log_level="warning"):
        for number in range(rounds):
            given = [[f"{number}-{batch}-{key:08}" for key in range(BATCH)] for batch in range(batches)]
            in_batches.append(await rate(given, fresh_batch, TASKS) * BATCH)
            again.append(await rate(given, seen_batch, TASKS) * BATCH)
            alone = [[f"{number}-{key:08}"] for key in range(singles)]
            one_by_one.append(await rate(alone, fresh_key, SINGLE_TASKS))
    return in_batches, one_by_one, again


async def rate(given: Sequence[list[str]], each: Callable[[list[str]], Awaitable[None]], tasks: int) -> float:
    """Return how many items per second this number of tasks processes."""

    async def do(part: Sequence[list[str]]) -> None:
        for keys in part:
            await each(keys)

    began = time.perf_counter()
    await asyncio.gather(*(do(given[task::tasks]) for task in range(tasks)))
    return len(given) / (time.perf_counter() - began)


async def fresh_batch(keys: list[str]) -> None:
    async with once_many("batches", keys) as batch:
        if len(batch.fresh) != len(keys):
            raise RuntimeError("a key that is new is not fresh")


async def seen_batch(keys: list[str]) -> None:
    async with once_many("batches", keys) as batch:
        if len(batch.seen) != len(keys):
            raise RuntimeError("a key of a finished batch is not seen")


async def fresh_key(keys: list[str]) -> None:
    async with once("singles", keys[0]) as fresh:
        if not fresh:
            raise RuntimeError("a key that is new is not fresh")


def check(address: str, expected: int) -> None:
    with psycopg.connect(address) as session:
        row = session.execute("SELECT count(*) FROM flotilla.once_keys WHERE state = 'seen'").fetchone()
    if row != (expected,):
        raise RuntimeError(f"{row} keys are seen, but {expected} were processed")
