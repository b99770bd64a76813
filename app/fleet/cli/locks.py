"""Locks: who holds which, and releasing one whoever holds it."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from app.fleet.cli.terminal import AsJson, changing, connected, lasted, load, say, say_json, say_table
from app.fleet.cluster import commands
from app.fleet.coordination.locks import admin
from app.fleet.coordination.locks.admin import LockRecord
from app.fleet.settings import FleetSettings

COLUMNS = ("NAME", "TOKEN", "INSTANCE", "HOST", "PID", "HOLDER", "HELD", "EXPIRES", "WAITING")


def locks(as_json: AsJson = False) -> None:
    """List the locks that are held: by whom, for how long already, and how many wait."""
    rows = asyncio.run(everything(load()))
    if as_json:
        say_json(rows)
    else:
        say_table(COLUMNS, map(cells, rows))


def release(
    name: Annotated[str, typer.Argument(help="Which lock.")],
    reason: Annotated[str, typer.Option(help="Why; it is kept, with who you are.")],
    as_json: AsJson = False,
) -> None:
    """Release a lock whoever holds it; whatever its holder still guards by it is refused."""
    record = asyncio.run(force(load(), name, reason))
    if as_json:
        say_json(record)
    else:
        say(f"{record.name}: released; {record.instance} held it with the token {record.token}")


# -- asking -----------------------------------------------------------------------------------------------------------


async def everything(settings: FleetSettings) -> Sequence[LockRecord]:
    async with connected(settings) as (connection, namespace):
        return await admin.list_locks(connection, namespace)


async def force(settings: FleetSettings, name: str, reason: str) -> LockRecord:
    async with changing(settings) as (connection, namespace), connection.transaction():
        await commands.announce(connection, namespace, "release", name)
        return await admin.force_release(connection, namespace, name, reason=reason, by=commands.operator())


# -- showing ----------------------------------------------------------------------------------------------------------


def cells(lock: LockRecord) -> Iterator[str]:
    now = datetime.now(UTC)
    left = (lock.expires_at - now).total_seconds()
    yield from (lock.name, str(lock.token), lock.instance, lock.hostname, str(lock.pid), lock.holder or "")
    yield lasted(lock.acquired_at, now)
    yield f"in {left:.0f} s" if left > 0 else "expired"
    yield str(lock.waiting)
