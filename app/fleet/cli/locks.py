"""Commands about locks: list the held locks, and release a lock by force."""

import asyncio
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated

import typer

from app.fleet.cli.terminal import (
    AsJson,
    coarse_duration,
    connect,
    connect_to_change,
    load_settings,
    write,
    write_json,
    write_table,
)
from app.fleet.cluster import command_audit
from app.fleet.coordination.locks import admin
from app.fleet.coordination.locks.admin import LockRecord
from app.fleet.settings import FleetSettings

COLUMNS = ("NAME", "TOKEN", "INSTANCE", "HOST", "PID", "HOLDER", "HELD", "EXPIRES", "WAITING")


def locks(as_json: AsJson = False) -> None:
    """List the locks that are held: their holders, for how long, and how many tasks wait for each."""
    rows = asyncio.run(find_locks(load_settings()))
    if as_json:
        write_json(rows)
    else:
        write_table(COLUMNS, map(cells, rows))


def release(
    name: Annotated[str, typer.Argument(help="Name of the lock.")],
    reason: Annotated[str, typer.Option(help="Why you release it; recorded with your user name.")],
    as_json: AsJson = False,
) -> None:
    """Release a lock by force. Its holder is cancelled, and cannot commit anything that the lock guards."""
    record = asyncio.run(force_release(load_settings(), name, reason))
    if as_json:
        write_json(record)
    else:
        write(f"{record.name}: released; {record.instance} held it with the token {record.token}")


# -- requests ---------------------------------------------------------------------------------------------------------


async def find_locks(settings: FleetSettings) -> Sequence[LockRecord]:
    async with connect(settings) as (connection, namespace):
        return await admin.list_locks(connection, namespace)


async def force_release(settings: FleetSettings, name: str, reason: str) -> LockRecord:
    async with connect_to_change(settings) as (connection, namespace), connection.transaction():
        await command_audit.notify_leader(connection, namespace, "release", name)
        return await admin.force_release(connection, namespace, name, reason=reason, by=command_audit.operator())


# -- output -----------------------------------------------------------------------------------------------------------


def cells(lock: LockRecord) -> Iterator[str]:
    now = datetime.now(UTC)
    left = (lock.expires_at - now).total_seconds()
    yield from (lock.name, str(lock.token), lock.instance, lock.hostname, str(lock.pid), lock.holder or "")
    yield coarse_duration(lock.acquired_at, now)
    yield f"in {left:.0f} s" if left > 0 else "expired"
    yield str(lock.waiting)
