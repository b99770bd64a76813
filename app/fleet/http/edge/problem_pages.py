"""`GET /problems`: the pages to which the `type` of a problem leads."""

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from app.fleet.http.edge.problems import KINDS, NotFound

router = APIRouter(tags=["problems"], default_response_class=PlainTextResponse)


@router.get("/problems")
async def problem_pages() -> str:
    """List every kind of problem."""
    return "".join(f"/problems/{kind.slug}  {kind.status}  {kind.title}\n" for kind in KINDS.values())


@router.get("/problems/{slug}")
async def problem_page(slug: str) -> str:
    """Explain one kind of problem."""
    if slug not in KINDS:
        raise NotFound(f"there is no kind of problem {slug!r}: GET /problems lists all kinds")
    kind = KINDS[slug]
    return f"{kind.title}\n{'=' * len(kind.title)}\n\nStatus {kind.status}. {kind.remedy}\n"
