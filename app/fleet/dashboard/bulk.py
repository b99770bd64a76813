"""Changing all runs that match a filter: first a page that says what would happen and to how many, then the change.

One request changes at most `MOST` runs, in batches that are transactions of their own, and the answer says whether more
match. Runs that are triggered after the first page are left out: it has the highest id that may change. Runs that have
left the state of the filter meanwhile are left out, too: a pending run that was to be cancelled may have begun.
"""

from typing import Literal

from fastapi import Request, Response

from app.fleet.dashboard.actions import Operator
from app.fleet.dashboard.frame.page import new_router, reading, show
from app.fleet.dashboard.frame.shared_reads import shared_reads
from app.fleet.dashboard.frame.wording import COUNTED
from app.fleet.dashboard.runs import InFilter, RunFilter
from app.fleet.edge.audit import set_subject
from app.fleet.edge.context import InContext
from app.fleet.edge.problems import HttpError
from app.fleet.runs.cancel import cancel_these
from app.fleet.runs.read.matching import walk
from app.fleet.runs.retry import Retried, retry_these
from app.fleet.stream.relay import CHANGED

MOST = 10_000
BATCH = 1000

What = Literal["retry", "cancel"]

router = new_router()


@router.get("/changes/{what}")
async def preview(what: What, request: Request, context: InContext, who: Operator, given: InFilter) -> Response:
    """Say what would happen to how many runs."""
    check(what, given)
    matching, newest = 0, None
    async with reading(context) as connection:
        namespace = context.database.namespace
        wanted = await given.selection(connection, namespace)
        async for found in walk(connection, namespace, wanted, batch=COUNTED + 1, most=COUNTED + 1):
            matching += len(found.ids)
            newest = newest or next(iter(found.ids), None)
    return show(
        request, context, "change.html", who, title=title_of(what), what=what, filter=given, matching=matching,
        reached=found.reached, most=MOST, query=given.query(before=None if newest is None else newest + 1),
    )  # fmt: skip


@router.post("/changes/{what}")
async def change(what: What, request: Request, context: InContext, who: Operator, given: InFilter) -> Response:
    check(what, given)
    namespace = context.database.namespace
    many = left_out = 0
    async with context.database.autocommit() as connection:
        wanted = await given.selection(connection, namespace)
        assert wanted.action_id is not None
        assert wanted.state is not None
        async for found in walk(connection, namespace, wanted, batch=BATCH, most=MOST):
            if what == "retry":
                done = await retry_these(connection, namespace, wanted.action_id, wanted.state, found.ids)
            else:
                ids = await cancel_these(connection, namespace, wanted.action_id, wanted.state, found.ids)
                context.stream.relay.notify(CHANGED, ids)
                done = Retried(len(ids), 0)
            many, left_out = many + done.many, left_out + done.left_out
    set_subject(request, f"{given.action} {many} runs")
    shared_reads(request).forget()
    return show(
        request, context, "changed.html", who, title=title_of(what), what=what, filter=given, many=many,
        left_out=left_out, more=None if found.reached is None else given.query(before=found.reached),
    )  # fmt: skip


def check(what: What, given: RunFilter) -> None:
    if given.change != what:
        raise HttpError(
            "all runs of a list can be retried if it has one action and the state failed or cancelled, and cancelled "
            "if it has one action and the state pending or running"
        )


def title_of(what: What) -> str:
    return "Retry all runs that match" if what == "retry" else "Cancel all runs that match"
