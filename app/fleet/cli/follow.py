"""Following: a run from its first event to its end, or every change of state in the cluster from now on.

Read from PostgreSQL itself, by the events' numbers; no instance needs to be up for that. A database that goes away
meanwhile is waited for, and nothing is shown twice. Who stops following stops nothing else.

For people, a line for each thing that happens, and on a terminal a bar below them. For machines, a line of JSON each,
the same that the streams of the REST API have as `data`.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, Protocol, TypeVar

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from app.fleet.cli.terminal import connected, one_line, out, own_name_as_typed, say, say_json, say_line, took, warn
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool import Connection
from app.fleet.engine.actions import admin
from app.fleet.errors import DatabaseUnreachable, FeedOff, RunUnknown
from app.fleet.runs import feed
from app.fleet.runs.events import STATE, StoredEvent, read_pages
from app.fleet.runs.feed import Change
from app.fleet.runs.feed_numbers import Numberer
from app.fleet.runs.records import RunRecord, find, find_all
from app.fleet.settings import FleetSettings

EVERY = 0.2


def follow(settings: FleetSettings, run_id: int, *, as_json: bool) -> NoReturn:
    """Show a run until it ends, and end with 0 if it succeeded."""
    me = own_name_as_typed()
    said = (
        f"stopped following; run {run_id} goes on. `{me} runs {run_id} --follow` takes it up again, "
        f"`{me} runs cancel {run_id}` ends it"
    )
    state = until_interrupted(
        OneRun(run_id, ForMachines(run_id) if as_json else ForPeople()).to_the_end(settings), said
    )
    sys.exit(0 if state == "succeeded" else 1)


def follow_all(settings: FleetSettings, action: str | None, states: Sequence[str], *, as_json: bool) -> NoReturn:
    """Show what becomes of all runs, until somebody has seen enough."""
    until_interrupted(Everything(action, states, as_json=as_json).for_ever(settings), "stopped following")
    raise AssertionError


def until_interrupted(following: Coroutine[Any, Any, str], said: str) -> str:
    try:
        return asyncio.run(following)
    except KeyboardInterrupt:
        warn(said)
        sys.exit(130)


Answer = TypeVar("Answer")


class Following:
    """Somebody who reads along, from connection to connection."""

    begun = False

    async def through_outages(
        self, settings: FleetSettings, read: Callable[[Connection, Namespace], Awaitable[Answer]]
    ) -> Answer:
        away = False
        while True:
            try:
                async with connected(settings) as (connection, namespace):
                    away = False
                    return await read(connection, namespace)
            except DatabaseUnreachable as error:
                if not self.begun:
                    raise
                if not away:
                    warn(f"flotilla: {error}. Waiting for it; runs need nothing from here")
                away = True
                await asyncio.sleep(EVERY)


# -- one run ----------------------------------------------------------------------------------------------------------


class Reader(Protocol):
    """Somebody who is told."""

    def begin(self, run: RunRecord) -> None: ...
    def event(self, event: StoredEvent) -> None: ...
    def end(self) -> None: ...


class OneRun(Following):
    def __init__(self, run_id: int, reader: Reader) -> None:
        self._run_id = run_id
        self._reader = reader
        # How far the reader has come, and the last state they were told.
        self._seq = 0
        self._state = ""

    async def to_the_end(self, settings: FleetSettings) -> str:
        """Tell the reader everything, and return the state in which the run ended."""
        try:
            return await self.through_outages(settings, self._read_along)
        finally:
            self._reader.end()

    async def _read_along(self, connection: Connection, namespace: Namespace) -> str:
        if not self.begun:
            self._reader.begin(await find(connection, namespace, self._run_id))
            self.begun = True
        while True:
            page = (await read_pages(connection, namespace, {self._run_id: self._seq})).get(self._run_id)
            if page is None:
                raise RunUnknown(f"run {self._run_id} was forgotten meanwhile")
            for event in page.events:
                self._reader.event(event)
                self._seq = event.seq
                if event.kind == STATE:
                    self._state = event.data["state"]
            if self._seq >= page.total:
                if page.ended:
                    return self._state
                await asyncio.sleep(EVERY)


class ForMachines:
    """One line of JSON for each thing."""

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id

    def begin(self, run: RunRecord) -> None:
        pass

    def event(self, event: StoredEvent) -> None:
        say_line(event.as_json(self._run_id))

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
        self._story: Story | None = None

    def begin(self, run: RunRecord) -> None:
        self._story = Story(run)
        self._bar.start()

    def end(self) -> None:
        self._bar.stop()

    def event(self, event: StoredEvent) -> None:
        match event.kind, event.data:
            case "state", data:
                self._bar.update(self._task, description=data["state"])
                assert self._story is not None
                line(event.at, self._story.goes_on(event))
                if data.get("result") is not None:
                    say_json(data["result"])
            case "progress", {"done": done, "text": text}:
                self._progressed(event.at, done, text)
            case "log", {"level": level, "text": text}:
                line(event.at, text if level == "info" else f"{level}: {text}")
            case kind, data:
                line(event.at, kind if data is None else f"{kind}  {one_line(data)}")

    def _progressed(self, at: datetime, done: float, text: str | None) -> None:
        self._bar.update(self._task, total=1, completed=done)
        shown = f"{done:4.0%}  {text or ''}".rstrip()
        # The bar shows it already, on a terminal.
        if shown != self._progress and (text or self._bar.disable):
            line(at, shown)
        self._progress = shown


class Story:
    """A run's changes of state, in words: what one means depends on the one before."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._attempt = 0
        self._began: datetime | None = None

    def goes_on(self, event: StoredEvent) -> str:
        data, run = event.data, self._run
        attempt, instance, error = data["attempt"], data["instance"], data.get("error")
        before, self._attempt = self._attempt, attempt
        match data["state"]:
            case "pending" if event.seq == 1:
                return f"run {run.id} of {run.action}: pending"
            case "pending" if error is None:
                return f"pending: {instance} leaves, and it goes on elsewhere"
            case "pending":
                return f"pending{self._after(before)}{later(data.get('run_at'))}: {one_line(error)}"
            case "running":
                self._began = event.at
                return f"running on {instance}, attempt {attempt} of {run.max_attempts}"
            case "succeeded":
                return f"succeeded after {took(self._began, event.at)}"
            case ended:
                return f"{ended}{self._after(attempt)}: {error}"

    def _after(self, attempt: int) -> str:
        return f" after attempt {attempt} of {self._run.max_attempts}" if attempt else ""


def later(run_at: str | None) -> str:
    instant = None if run_at is None else datetime.fromisoformat(run_at)
    if instant is None or instant <= datetime.now(UTC):
        return ""
    return f", not before {instant.astimezone():%Y-%m-%d %H:%M:%S}"


def line(at: datetime, text: str) -> None:
    say(f"{at.astimezone():%H:%M:%S}  {text}")


# -- everything -------------------------------------------------------------------------------------------------------


class Everything(Following):
    """The feed, or some of it."""

    def __init__(self, action: str | None, states: Sequence[str], *, as_json: bool) -> None:
        self._action = action
        self._states = states
        self._as_json = as_json
        self._names: dict[int, str] = {}
        self._numberer = Numberer()
        self._number = 0

    async def for_ever(self, settings: FleetSettings) -> NoReturn:
        await self.through_outages(settings, self._read_along)
        raise AssertionError

    async def _read_along(self, connection: Connection, namespace: Namespace) -> None:
        if not self.begun:
            if self._action is not None:
                await admin.id_of(connection, namespace, self._action)
            numbering = await self._numberer.step(connection, namespace)
            while numbering.enabled and not numbering.complete:
                await asyncio.sleep(EVERY if numbering.busy else 0)
                numbering = await self._numberer.step(connection, namespace)
            if not numbering.enabled:
                raise FeedOff("the feed is switched off: FLOTILLA_FEED_RETENTION is 0")
            self._number = numbering.last_number
            self.begun = True
        while True:
            await self._numberer.step(connection, namespace)
            batches = await feed.read_batches(connection, namespace, self._number)
            for batch in batches:
                if (until := batch.missing(self._number)) > self._number:
                    warn(f"{until - self._number} changes were missed: they are not kept for that long")
                await self._tell(connection, namespace, batch.after(self._number))
                self._number = batch.seq
            if not batches:
                await asyncio.sleep(EVERY)

    async def _tell(self, connection: Connection, namespace: Namespace, changes: Sequence[Change]) -> None:
        if not self._names.keys() >= {change.action_id for change in changes}:
            self._names = await feed.action_names(connection, namespace)
        wanted = [
            change
            for change in changes
            if self._action in {None, self._names[change.action_id]}
            and (not self._states or change.state in self._states)
        ]
        if self._as_json:
            for change in wanted:
                say_line(change.as_json(self._names))
            return
        unwell = [change.run_id for change in wanted if change.state in {"failed", "cancelled"}]
        errors = {run.id: run.error for run in await find_all(connection, namespace, unwell)} if unwell else {}
        for change in wanted:
            text = f"run {change.run_id} of {self._names[change.action_id]}: {change.state}"
            if change.state == "running":
                text += f" on {change.instance}, attempt {change.attempt}"
            elif change.state == "pending" and change.attempt:
                text += f" after attempt {change.attempt}"
            if error := errors.get(change.run_id):
                text += f": {one_line(error)}"
            line(change.at, text)
