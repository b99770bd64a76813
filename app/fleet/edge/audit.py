"""The audit log: one event for each request that may change something, with its caller, its subject and its status.

    request.audited caller=alice method=POST route=/actions/{name}/pause subject=feed-monitor status=200

`subject` is what the request changes: the parameters of the path, or what the route sets with `set_subject`, such as
the id of the new run. Payloads are never logged. A refused request is logged too, without a caller if it had no valid
API key. The caller is the name of the key, or what the service's own sign-in returned.

The command line changes PostgreSQL directly, without an instance: `cluster/command_audit.py` notifies the leader in the
same transaction, which logs `command.audited`.
"""

from starlette.requests import Request
from starlette.types import Scope

from app.fleet.edge.problems import SAFE_METHODS
from app.fleet.telemetry.logs import event_log

MAX_SUBJECT_LENGTH = 200

log = event_log(__name__)


def set_subject(request: Request, subject: str) -> None:
    """Set the subject of this request, where its path does not name it."""
    request.state.subject = subject


def record(scope: Scope, status: int | None) -> None:
    """Log a request after its response; `status` is None if the client left before that."""
    if scope["method"] in SAFE_METHODS:
        return
    state = scope.get("state", {})
    subject = state.get("subject") or " ".join(str(each) for each in scope.get("path_params", {}).values())
    log.info(
        "request.audited",
        caller=caller.name if (caller := state.get("caller")) else None,
        method=scope["method"],
        route=getattr(scope.get("route"), "path", None),
        subject=subject[:MAX_SUBJECT_LENGTH],
        status=status,
    )
