"""The first page: the instances, who leads, what is wrong, and what happened in the last hour."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from fastapi import Request, Response

from app.fleet.dashboard.frame import cluster_reads
from app.fleet.dashboard.frame.cluster_reads import Change
from app.fleet.dashboard.frame.page import kept, new_router, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.edge.context import InContext
from app.fleet.engine.actions.admin import ActionRecord

HOUR = timedelta(hours=1)
# The width of the time line, in its own units.
WIDTH = 1000

router = new_router()


@dataclass(frozen=True)
class Mark:
    """A change at its place on the time line."""

    x: float
    what: str
    title: str


@router.get("")
@kept
async def fleet_page(request: Request, context: InContext, who: InViewer) -> Response:
    now = await cluster_reads.now(request)
    instances = await cluster_reads.instances(request)
    history = await cluster_reads.history(request)
    runnable = (await cluster_reads.runnable(request)).values()
    return show(
        request,
        context,
        "fleet.html",
        who,
        title="Fleet",
        now=now,
        instances=[each for each in instances if each.live],
        gone=[each for each in instances if not each.live],
        working_on=working_on(await cluster_reads.all_actions(request)),
        anomalies=await cluster_reads.anomalies(request),
        history=history,
        marks=marks(history, now),
        waiting=sum(runs for runs, _ in runnable),
        oldest=max((seconds for _, seconds in runnable), default=0.0),
    )


def working_on(actions: Sequence[ActionRecord]) -> dict[str, list[str]]:
    """Return the names of the actions that each instance executes now."""
    found: dict[str, list[str]] = {}
    for action in actions:
        for instance in action.running_on:
            found.setdefault(instance, []).append(action.name)
    return found


def marks(history: Sequence[Change], now: datetime) -> list[Mark]:
    return [
        Mark(
            round(WIDTH * (1 - (now - each.at) / HOUR), 1),
            each.what,
            f"{each.at:%H:%M:%S} {each.instance} {each.what}",
        )
        for each in history
        if now - each.at <= HOUR
    ]
