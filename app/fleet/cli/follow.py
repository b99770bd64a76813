"""Following a run: what it says and what becomes of it, from its first event to its end.

The run is read first and its events after it: of a run that has ended, they are all there then. A database that goes
away meanwhile is waited for, and nothing is shown twice. Who stops following stops nothing else.

For people, a line for each thing that happens, and on a terminal a bar below them. For machines, a line of JSON each:
`{"run": …}` whenever its state, attempt or instance is another, `{"event": …}` for what it emitted.
"""

import asyncio
import sys
from datetime import UTC, datetime
from typing import NoReturn, Protocol

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from app.fleet.cli.terminal import connected, one_line, out, own_name_as_typed, say, say_json, say_json_line, took, warn
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.engine.runs import ACTIVE, RunRecord, find
from app.fleet.errors import DatabaseUnreachable
from app.fleet.settings import FleetSettings
from app.fleet.stream.events import Written, read

EVERY = 0.2
AT_ONCE = 1000


def follow(settings: FleetSettings, run_id: int, *, as_json: bool) -> NoReturn:
    """Show a run until it ends, and end with 0 if it succeeded."""
    try:
        run = asyncio.run(Following(run_id, ForMachines() if as_json else ForPeople()).to_the_end(settings))
    except KeyboardInterrupt:
        me = own_name_as_typed()
        warn(
            f"stopped following; run {run_id} goes on. `{me} runs {run_id} --follow` takes it up again, "
            f"`{me} runs cancel {run_id}` ends it"
        )
        sys.exit(130)
    sys.exit(0 if run.state == "succeeded" else 1)


class Reader(Protocol):
    """Somebody who is told."""

    def begin(self) -> None: ...
    def state(self, run: RunRecord, before: RunRecord | None) -> None: ...
    def event(self, event: Written) -> None: ...
    def end(self) -> None: ...


class Following:
    """How far the reader has come."""

    def __init__(self, run_id: int, reader: Reader) -> None:
        self._run_id = run_id
        self._reader = reader
        self._seen: RunRecord | None = None
        self._seq = 0

    async def to_the_end(self, settings: FleetSettings) -> RunRecord:
        away = False
        self._reader.begin()
        try:
            while True:
                try:
                    async with connected(settings) as (connection, namespace):
                        away = False
                        return await self._read_along(connection, namespace)
                except DatabaseUnreachable as error:
                    if self._seen is None:
                        raise
                    if not away:
                        warn(f"flotilla: {error}. Waiting for it; the run needs nothing from here")
                    away = True
                    await asyncio.sleep(EVERY)
        finally:
            self._reader.end()

    async def _read_along(self, connection: Connection, namespace: Namespace) -> RunRecord:
        while True:
            run = await find(connection, namespace, self._run_id)
            events = await read(connection, namespace, self._run_id, self._seq, AT_ONCE)
            complete = len(events) < AT_ONCE
            self._tell(run, events, complete=complete)
            if complete and run.state not in ACTIVE:
                return run
            if complete:
                await asyncio.sleep(EVERY)

    def _tell(self, run: RunRecord, events: list[Written], *, complete: bool) -> None:
        """Tell in the order in which it happened, by PostgreSQL's clock."""
        before = self._seen
        changed = before is None or standing(run) != standing(before)
        if run.state == "running" and run.started_at is not None:
            earlier = [event for event in events if event.at < run.started_at]
        else:
            earlier = [] if before is None and run.state == "pending" else events
        for event in earlier:
            self._reader.event(event)
        # Its end comes after everything it said.
        if changed and (complete or run.state in ACTIVE):
            self._reader.state(run, before)
            self._seen = run
        for event in events[len(earlier) :]:
            self._reader.event(event)
        if events:
            self._seq = events[-1].seq


def standing(run: RunRecord) -> tuple[str, int, str | None]:
    return run.state, run.attempt, run.instance


# -- readers ----------------------------------------------------------------------------------------------------------


class ForMachines:
    """One line of JSON for each thing."""

    def begin(self) -> None:
        pass

    def state(self, run: RunRecord, _before: RunRecord | None) -> None:
        say_json_line({"run": run})

    def event(self, event: Written) -> None:
        say_json_line({"event": event._asdict()})

    def end(self) -> None:
        pass


class ForPeople:
    """A line for each thing, and on a terminal a bar below them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=out, transient=True, disable=not out.is_terminal, expand=False
        )
        self._task = self._bar.add_task("", total=None)
        self._progress = ""

    def begin(self) -> None:
        self._bar.start()

    def end(self) -> None:
        self._bar.stop()

    def state(self, run: RunRecord, before: RunRecord | None) -> None:
        self._bar.update(self._task, description=run.state)
        line(moment(run, before), f"run {run.id} of {run.action}: " * (before is None) + described(run, before))
        if run.result is not None:
            say_json(run.result)

    def event(self, event: Written) -> None:
        if event.kind != "progress" or not isinstance(event.data, dict):
            line(event.at, event.kind if event.data is None else f"{event.kind}  {one_line(event.data)}")
            return
        done, text = event.data.get("done", 0), event.data.get("text")
        self._bar.update(self._task, total=1, completed=done)
        shown = f"{done:4.0%}  {text or ''}".rstrip()
        # The bar shows it already, on a terminal.
        if shown != self._progress and (text or self._bar.disable):
            line(event.at, shown)
        self._progress = shown


def line(at: datetime, text: str) -> None:
    say(f"{at.astimezone():%H:%M:%S}  {text}")


def moment(run: RunRecord, before: RunRecord | None) -> datetime:
    """When it came to be so. Of a run that waits again nobody keeps it: about now."""
    if run.state == "pending":
        return run.created_at if before is None else datetime.now(UTC)
    return run.finished_at or run.started_at or run.created_at


def described(run: RunRecord, before: RunRecord | None) -> str:
    match run.state:
        case "running":
            return f"running on {run.instance}, attempt {run.attempt} of {run.max_attempts}"
        case "pending":
            return f"pending{reason_to_wait(run, before)}"
        case "succeeded":
            return f"succeeded after {took(run.started_at, run.finished_at)}"
        case _:
            return f"{run.state}{after_attempt(run)}: {run.error}"


def reason_to_wait(run: RunRecord, before: RunRecord | None) -> str:
    if before is not None and before.state == "running" and run.attempt < before.attempt:
        return f": {before.instance} leaves, and it goes on elsewhere"
    later = f", not before {run.run_at.astimezone():%Y-%m-%d %H:%M:%S}" if run.run_at > datetime.now(UTC) else ""
    return f"{after_attempt(run)}{later}: {one_line(run.error)}" if run.error else later


def after_attempt(run: RunRecord) -> str:
    return f" after attempt {run.attempt} of {run.max_attempts}" if run.attempt else ""
