"""One log event for each request that may change something: whose API key it was, what it asked for, how it ended.

    request.audited key=alice method=POST route=/actions/{name}/pause subject=feed-monitor status=200

`subject` is what the request was about: the parameters of the path, or what the route says itself (`about`), such as
the id of the run that was made. A payload is never logged. A request that is refused is logged too, without a key if
that is the reason.

What the command line does reaches PostgreSQL directly and no instance: `cli/terminal.py` notifies the instances in the
same transaction, and the leader logs `command.audited`.
"""

from starlette.requests import Request
from starlette.types import Scope

from app.fleet.http.edge.auth import name_of_key
from app.fleet.http.edge.context import Context
from app.fleet.http.edge.problems import SAFE_METHODS
from app.fleet.telemetry.logs import events

SUBJECT_MOST = 200

log = events(__name__)


def about(request: Request, subject: str) -> None:
    """Say what this request is about, where its path does not."""
    request.state.subject = subject


def record(context: Context, scope: Scope, status: int | None) -> None:
    """Log a request when it has been answered; without a status if its client left before."""
    if scope["method"] in SAFE_METHODS:
        return
    state = scope.get("state", {})
    subject = state.get("subject") or " ".join(str(each) for each in scope.get("path_params", {}).values())
    log.info(
        "request.audited",
        key=name_of_key(context, state.get("key")),
        method=scope["method"],
        route=getattr(scope.get("route"), "path", None),
        subject=subject[:SUBJECT_MOST],
        status=status,
    )
