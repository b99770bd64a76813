"""The charts: attempts by outcome, the backlog, and how late runs began, in the last hour or day."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fastapi import Query, Request, Response

from app.fleet.dashboard.charts import drawing, minutes
from app.fleet.dashboard.charts.drawing import Drawing
from app.fleet.dashboard.charts.minutes import ALL, SPANS, Period, Span
from app.fleet.dashboard.frame import cluster_reads, wording
from app.fleet.dashboard.frame.page import kept, new_router, show
from app.fleet.dashboard.frame.session import InViewer
from app.fleet.edge.context import InContext
from app.fleet.edge.problems import HttpError
from app.fleet.engine.figures.run_metrics import OUTCOMES

# From the bottom of a bar to its top: what needs attention is where the bar ends.
STACKED = ("succeeded", "retried", "paused", "cancelled", "failed")

router = new_router()


@dataclass(frozen=True)
class Chart:
    title: str
    # What it shows, and the essence of it in words.
    about: str
    label: str
    # The kind and the name of each series.
    legend: dict[str, str]
    drawing: Drawing


@router.get("/charts")
@kept
async def charts_page(
    request: Request,
    context: InContext,
    who: InViewer,
    span: Annotated[str, Query()] = "hour",
    action: Annotated[str, Query()] = "",
) -> Response:
    if span not in SPANS:
        raise HttpError(f"there is no such span: it is {' or '.join(SPANS)}")
    action_id = await cluster_reads.action_id(request, action) if action else ALL
    periods = await minutes.history(request, SPANS[span], action_id)
    return show(
        request,
        context,
        "charts.html",
        who,
        title="Charts",
        names=[each.name for each in await cluster_reads.all_actions(request)],
        action=action,
        span=span,
        spans=list(SPANS),
        width=width_of(SPANS[span]),
        periods=periods,
        charts=charts(periods, SPANS[span]),
    )


def charts(periods: Sequence[Period], span: Span) -> list[Chart]:
    if not any(each.attempts or each.begun or each.waiting for each in periods):
        return []
    return [attempts_chart(periods, span), backlog_chart(periods, span), lateness_chart(periods, span)]


def attempts_chart(periods: Sequence[Period], span: Span) -> Chart:
    most = max(periods, key=lambda each: each.attempts)
    ended = {kind: sum(each.ended[kind] for each in periods) for kind in map(str, OUTCOMES)}
    titles = [f"{clock(each)} {wording.outcomes(each.ended)}" if each.attempts else "" for each in periods]
    numbers = {kind: [each.ended[kind] for each in periods] for kind in STACKED}
    return Chart(
        "Attempts",
        f"Attempts that ended in each {width_of(span)}, by outcome. A run has an attempt more for each retry.",
        f"Attempts that ended in the last {span.name}: {wording.outcomes(ended)}."
        + (f" Most in a {width_of(span)}: {most.attempts:,}, at {clock(most)}." if most.attempts else ""),
        {kind: f"{ended[kind]:,} {kind}" for kind in STACKED},
        drawing.bars(numbers, titles, times(periods), wording.short),
    )


def backlog_chart(periods: Sequence[Period], span: Span) -> Chart:
    known = [each for each in periods if each.waiting is not None]
    most = max(known, key=lambda each: each.waiting or 0, default=None)
    titles = [f"{clock(each)} {each.waiting:,} waiting" if each.waiting is not None else "" for each in periods]
    numbers = {"backlog": [each.waiting for each in periods]}
    label = f"Runs that could begin, in the last {span.name}: "
    if most is None:
        label += "not known."
    elif not most.waiting:
        label += "none."
    else:
        label += f"at most {most.waiting:,}, at {clock(most)}; {known[-1].waiting:,} at {clock(known[-1])}."
    return Chart(
        "Backlog",
        "Runs that could begin and had not, once a minute"
        + ("." if span.minutes == 1 else f": the most of each {width_of(span)}.")
        + " Runs of a paused action are not among them.",
        label,
        {"line backlog": "waiting runs"},
        drawing.lines(numbers, titles, times(periods), drawing.COUNTS, wording.short),
    )


def lateness_chart(periods: Sequence[Period], span: Span) -> Chart:
    begun = sum(each.begun for each in periods)
    latest = max(periods, key=lambda each: each.longest_wait or 0)
    numbers = {
        "longest": [each.longest_wait for each in periods],
        "mean": [each.mean_wait for each in periods],
        "oldest": [each.oldest for each in periods],
    }
    label = f"Lateness in the last {span.name}: no run began."
    if begun:
        mean = sum((each.mean_wait or 0) * each.begun for each in periods) / begun
        label = (
            f"Lateness of the {begun:,} runs that began in the last {span.name}: {wording.span(mean)} on average, at "
            f"most {wording.span(latest.longest_wait)}, at {clock(latest)}."
        )
    return Chart(
        "Lateness",
        "How long runs waited from when they were due until their first attempt began; and for how long the oldest "
        "run that could begin had been due.",
        label,
        {"line longest": "longest wait", "line mean": "mean wait", "line oldest": "oldest run that waits"},
        drawing.lines(numbers, [lateness(each) for each in periods], times(periods), drawing.SECONDS, wording.span),
    )


def lateness(period: Period) -> str:
    parts = [
        f"{name} {wording.span(seconds)}"
        for name, seconds in (
            ("longest", period.longest_wait),
            ("mean", period.mean_wait),
            ("oldest that waits", period.oldest),
        )
        if seconds is not None
    ]
    return f"{clock(period)} {', '.join(parts)}" if parts else ""


def times(periods: Sequence[Period]) -> dict[int, str]:
    """Return the times on the axis: every quarter of an hour, or every six hours."""
    hours = len(periods) == SPANS["day"].periods
    return {
        place: clock(each)
        for place, each in enumerate(periods)
        if (each.at.minute == 0 and each.at.hour % 6 == 0 if hours else each.at.minute % 15 == 0)
    }


def clock(period: Period) -> str:
    return f"{period.at:%H:%M}"


def width_of(span: Span) -> str:
    return "minute" if span.minutes == 1 else f"{span.minutes} minutes"
