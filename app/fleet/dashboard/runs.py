"""The runs that match a filter. The filter is in the address, so a list can be sent to somebody else."""

import re
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Depends, Query, Request, Response

from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.page import kept, new_router, reading, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.dashboard.frame.shared_reads import shared
from app.fleet.db.namespace import Namespace
from app.fleet.db.pool.pool import Connection
from app.fleet.edge.context import InContext
from app.fleet.edge.problems import HttpError
from app.fleet.engine.actions import admin
from app.fleet.runs.effects.states import RunState
from app.fleet.runs.read.matching import Selection, find_matching, first_id_since
from app.fleet.runs.read.pages import NEWEST, ListedRun
from app.fleet.runs.retry import RETRYABLE

PAGE = 50
MAX_ID = 2**63 - 1
MAX_TEXT = 500
# What a browser sends for a field of the type `datetime-local`.
INSTANT = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(:[0-9]{2})?")

router = new_router()


@dataclass(frozen=True)
class RunFilter:
    """The filter as it is in the address. Empty fields are left out there."""

    action: str = ""
    state: str = ""
    key: str = ""
    ordering_key: str = ""
    # Failed runs with errors that are alike (`runs/read/alike.py`).
    alike: int | None = None
    words: str = ""
    since: str = ""
    until: str = ""
    before: int | None = None

    def query(self, **changes: Any) -> str:
        """Return the query of the address with these changes."""
        fields = asdict(replace(self, **changes))
        return urlencode({name: value for name, value in fields.items() if value not in ("", None)})

    @property
    def is_empty(self) -> bool:
        return not self.query(before=None)

    @property
    def change(self) -> str | None:
        """What can be done to all runs of this filter: `retry`, `cancel`, or nothing."""
        if not self.action or not (self.state or self.alike is not None):
            return None
        if self.alike is not None or self.state in RETRYABLE:
            return "retry"
        return None if self.state == RunState.SUCCEEDED else "cancel"

    async def selection(self, connection: Connection, namespace: Namespace) -> Selection:
        since, until = instant_of("From", self.since), instant_of("Until", self.until)
        return Selection(
            action_id=await admin.id_of(connection, namespace, self.action) if self.action else None,
            state=RunState(self.state) if self.state else RunState.FAILED if self.alike is not None else None,
            key=self.key or None,
            ordering_key=self.ordering_key or None,
            alike=self.alike,
            words=self.words or None,
            after=0 if since is None else await first_id_since(connection, namespace, since) - 1,
            before=min(
                NEWEST if self.before is None else self.before,
                NEWEST if until is None else await first_id_since(connection, namespace, until),
            ),
        )


async def run_filter(
    action: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    state: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    key: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    ordering_key: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    alike: Annotated[int | None, Query(ge=-MAX_ID - 1, le=MAX_ID)] = None,
    words: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    since: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    until: Annotated[str, Query(max_length=MAX_TEXT)] = "",
    before: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
) -> RunFilter:
    if state and state not in list(RunState):
        raise HttpError(f"there is no such state: a run is {', '.join(RunState)}")
    if alike is not None and (not action or state not in {"", RunState.FAILED}):
        raise HttpError("errors are alike within one action, and only failed runs have one: name the action")
    if "\0" in key + ordering_key + words:
        raise HttpError("PostgreSQL stores no text with a NUL character, so nothing can match it")
    return RunFilter(action, state, key, ordering_key, alike, words, since, until, before)


InFilter = Annotated[RunFilter, Depends(run_filter)]


def instant_of(field: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        if INSTANT.fullmatch(text):
            return datetime.fromisoformat(text).replace(tzinfo=UTC)
    except ValueError:
        pass
    raise HttpError(f"{field}: this is no date and time, such as 2026-11-20T08:30")


@router.get("/runs")
@kept
async def runs_page(request: Request, context: InContext, who: InViewer, given: InFilter) -> Response:
    async def read() -> tuple[list[ListedRun], int | None]:
        namespace = context.database.namespace
        async with reading(context) as connection:
            wanted = await given.selection(connection, namespace)
            return await find_matching(connection, namespace, wanted, PAGE)

    runs, reached = await shared(request, ("runs", given), read, statements=2)
    return show(
        request,
        context,
        "runs.html",
        who,
        title="Runs",
        now=await cluster_reads.now(request),
        runs=runs,
        page_size=PAGE,
        names=[each.name for each in await cluster_reads.all_actions(request)],
        states=list(RunState),
        filter=given,
        more=None if reached is None else given.query(before=reached),
        reached=reached,
    )
