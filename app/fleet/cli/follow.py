"""`--follow`: show one run from its first event to its end, or all state changes in the cluster from now on.

The command reads from PostgreSQL by the numbers of the events, so it needs no instance. After an outage of the database
it continues where it stopped, and shows nothing twice. Ctrl-C ends the command and not the run.

The output is one line per event, with a progress bar below them on a terminal; with `--json`, each line is the same
JSON that the streams of the REST API have as `data`.
"""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from app.fleet.cli.terminal import command_name, connect, duration, one_line, out, warn, write, write_json, write_line
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.engine.actions import admin
from app.fleet.errors import DatabaseUnreachable, FeedOff, RunUnknown
from app.fleet.runs.effects import feed
from app.fleet.runs.effects.events import STATE, StoredEvent, read_pages
from app.fleet.runs.effects.feed import Change
from app.fleet.runs.effects.feed_numbers import Numberer
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.records import RunRecord, find, find_all
from app.fleet.runs.retry import RETRYABLE
from app.fleet.settings import FleetSettings

POLL_INTERVAL = 0.2


def follow(settings: FleetSettings, run_id: int, *, as_json: bool) -> NoReturn:
    """Show a run until it ends, and exit with 0 if it succeeded, else with 1."""
    me = command_name()
    message = (
        f"stopped following; run {run_id} continues. `{me} runs {run_id} --follow` follows it again, "
        f"`{me} runs cancel {run_id}` cancels it"
    )
    state = until_interrupted(
        RunFollower(run_id, JsonOutput(run_id) if as_json else TextOutput()).follow(settings), message
    )
    sys.exit(0 if state == RunState.SUCCEEDED else 1)


def follow_all(settings: FleetSettings, action: str | None, states: Sequence[str], *, as_json: bool) -> NoReturn:
    """Show the state changes of all runs until Ctrl-C."""
    until_interrupted(FeedFollower(action, states, as_json=as_json).follow(settings), "stopped following")
    raise AssertionError


def until_interrupted(following: Coroutine[Any, Any, str], message: str) -> str:
    try:
        return asyncio.run(following)
    except KeyboardInterrupt:
        warn(message)
        sys.exit(130)


Answer = TypeVar("Answer")


class Follower:
    """Reads with one connection after another: it reconnects after an outage, once it has begun."""

    begun = False

    async def through_outages(
        self, settings: FleetSettings, read: Callable[[Connection, Namespace], Awaitable[Answer]]
    ) -> Answer:
        warned = False
        while True:
            try:
                async with connect(settings) as (connection, namespace):
                    warned = False
                    return await read(connection, namespace)
            except DatabaseUnreachable as error:
                if not self.begun:
                    raise
                if not warned:
                    warn(f"flotilla: {error}. Waiting for the database; runs do not need this command")
                warned = True
                await asyncio.sleep(POLL_INTERVAL)


# -- one run ----------------------------------------------------------------------------------------------------------


class Output:
    """Shows the events of a run."""

    def begin(self, run: RunRecord) -> None: ...
    def event(self, event: StoredEvent) -> None: ...
    def end(self) -> None: ...


class RunFollower(Follower):
    def __init__(self, run_id: int, output: Output) -> None:
        self._run_id = run_id
        self._output = output
        # The number of the last event shown, and the last state shown.
        self._seq = 0
        self._state = ""

    async def follow(self, settings: FleetSettings) -> str:
        """Show all events, and return the state in which the run ended."""
        try:
            return await self.through_outages(settings, self._read_to_end)
        finally:
            self._output.end()

    async def _read_to_end(self, connection: Connection, namespace: Namespace) -> str:
        if not self.begun:
            self._output.begin(await find(connection, namespace, self._run_id))
            self.begun = True
        while True:
            page = (await read_pages(connection, namespace, {self._run_id: self._seq})).get(self._run_id)
            if page is None:
                raise RunUnknown(f"run {self._run_id} was deleted meanwhile, because its retention is over")
            for event in page.events:
                self._output.event(event)
                self._seq = event.seq
                if event.kind == STATE:
                    self._state = event.data["state"]
            if self._seq >= page.total:
                if page.ended:
                    return self._state
                await asyncio.sleep(POLL_INTERVAL)


class JsonOutput(Output):
    """Prints one line of JSON per event."""

    def __init__(self, run_id: int) -> None:
        self._run_id = run_id

    def event(self, event: StoredEvent) -> None:
        write_line(event.as_json(self._run_id))


class TextOutput(Output):
    """Prints one line per event, and on a terminal a progress bar below them."""

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn())
        self._bar = Progress(
            *columns, TimeElapsedColumn(), console=out, transient=True, disable=not out.is_terminal, expand=False
        )
        self._task = self._bar.add_task("", total=None)
        self._progress = ""
        self._history: History | None = None

    def begin(self, run: RunRecord) -> None:
        self._history = History(run)
        self._bar.start()

    def end(self) -> None:
        self._bar.stop()

    def event(self, event: StoredEvent) -> None:
        match event.kind, event.data:
            case "state", data:
                self._bar.update(self._task, description=data["state"])
                assert self._history is not None
                write_at(event.at, self._history.describe(event))
                if data.get("result") is not None:
                    write_json(data["result"])
            case "progress", {"done": done, "text": text}:
                self._show_progress(event.at, done, text)
            case "log", {"level": level, "text": text}:
                write_at(event.at, text if level == "info" else f"{level}: {text}")
            case kind, data:
                write_at(event.at, kind if data is None else f"{kind}  {one_line(data)}")

    def _show_progress(self, at: datetime, done: float, text: str | None) -> None:
        self._bar.update(self._task, total=1, completed=done)
        shown = f"{done:4.0%}  {text or ''}".rstrip()
        # On a terminal, the bar already shows a progress without a text.
        if shown != self._progress and (text or self._bar.disable):
            write_at(at, shown)
        self._progress = shown


class History:
    """Describes the state changes of a run. The text of a change depends on the changes before it."""

    def __init__(self, run: RunRecord) -> None:
        self._run = run
        self._attempt = 0
        self._began: datetime | None = None

    def describe(self, event: StoredEvent) -> str:
        data, run = event.data, self._run
        attempt, instance, error = data["attempt"], data["instance"], data.get("error")
        before, self._attempt = self._attempt, attempt
        match data["state"]:
            case RunState.PENDING if event.seq == 1:
                return f"run {run.id} of {run.action}: pending"
            case RunState.PENDING if error is None:
                return f"pending: {instance} is shutting down, and another instance will continue the run"
            case RunState.PENDING:
                return f"pending{self._after(before)}{not_before(data.get('run_at'))}: {one_line(error)}"
            case RunState.RUNNING:
                self._began = event.at
                return f"running on {instance}, attempt {attempt} of {run.max_attempts}"
            case RunState.SUCCEEDED:
                return f"succeeded after {duration(self._began, event.at)}"
            case ended:
                return f"{ended}{self._after(attempt)}: {error}"

    def _after(self, attempt: int) -> str:
        return f" after attempt {attempt} of {self._run.max_attempts}" if attempt else ""


def not_before(run_at: str | None) -> str:
    instant = None if run_at is None else datetime.fromisoformat(run_at)
    if instant is None or instant <= datetime.now(UTC):
        return ""
    return f", not before {instant.astimezone():%Y-%m-%d %H:%M:%S}"


def write_at(at: datetime, text: str) -> None:
    write(f"{at.astimezone():%H:%M:%S}  {text}")


# -- all runs ---------------------------------------------------------------------------------------------------------


class FeedFollower(Follower):
    """Shows the feed: all of it, or only the changes of one action or to some states."""

    def __init__(self, action: str | None, states: Sequence[str], *, as_json: bool) -> None:
        self._action = action
        self._states = states
        self._as_json = as_json
        self._names: dict[int, str] = {}
        self._numberer = Numberer()
        self._number = 0

    async def follow(self, settings: FleetSettings) -> NoReturn:
        await self.through_outages(settings, self._read_for_ever)
        raise AssertionError

    async def _read_for_ever(self, connection: Connection, namespace: Namespace) -> None:
        if not self.begun:
            if self._action is not None:
                await admin.id_of(connection, namespace, self._action)
            numbering = await self._numberer.step(connection, namespace)
            while numbering.enabled and not numbering.complete:
                await asyncio.sleep(POLL_INTERVAL if numbering.busy else 0)
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
                    warn(f"{until - self._number} changes were missed: the feed has deleted them after its retention")
                await self._show(connection, namespace, batch.after(self._number))
                self._number = batch.seq
            if not batches:
                await asyncio.sleep(POLL_INTERVAL)

    async def _show(self, connection: Connection, namespace: Namespace, changes: Sequence[Change]) -> None:
        if not self._names.keys() >= {change.action_id for change in changes}:
            self._names = await feed.action_names(connection, namespace)
        selected = [
            change
            for change in changes
            if self._action in {None, self._names[change.action_id]}
            and (not self._states or change.state in self._states)
        ]
        if self._as_json:
            for change in selected:
                write_line(change.as_json(self._names))
            return
        failed = [change.run_id for change in selected if change.state in RETRYABLE]
        errors = {run.id: run.error for run in await find_all(connection, namespace, failed)} if failed else {}
        for change in selected:
            text = f"run {change.run_id} of {self._names[change.action_id]}: {change.state}"
            if change.state == RunState.RUNNING:
                text += f" on {change.instance}, attempt {change.attempt}"
            elif change.state == RunState.PENDING and change.attempt:
                text += f" after attempt {change.attempt}"
            if error := errors.get(change.run_id):
                text += f": {one_line(error)}"
            write_at(change.at, text)
