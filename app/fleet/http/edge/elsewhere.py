"""What an instance of role `worker` answers on every path that it does not serve."""

from fastapi import APIRouter

from app.fleet.http.edge.problems import Unavailable

router = APIRouter(include_in_schema=False)

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


@router.api_route("/{path:path}", methods=METHODS)
async def elsewhere() -> None:
    """Refuse the request: it can be served, but by another instance."""
    raise Unavailable(
        "this instance has the role worker, which serves only /health and /metrics: send the request to an instance "
        "of role web or all"
    )
