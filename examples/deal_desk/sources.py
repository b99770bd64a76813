"""News: an orchestrator triggers one run per source, which execute in parallel, and returns their results.

One source is slow, and one is unreliable. Each run has its own retries, breaker and limit, so no source delays the
others. The runs execute on any instance with free capacity.

The keys of these runs contain the id of the orchestrator's run. If the orchestrator is killed and begins again, it
triggers them again with the same keys and gets the existing runs, so no source is read twice. It waits for all of them
with `result`; a source that failed is a text in its own result.

Several sources, and filings, name the same deal. Each of them opens the deal, and the first one succeeds
(`research.open_deal`).
"""

import asyncio
from typing import Any

from pydantic import BaseModel
from sqlalchemy.dialects.postgresql import insert

from app.fleet import Run, RunFailed, action, breaker, limit, once, result
from examples.deal_desk.research import open_deal
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Headline, prepared
from examples.deal_desk.upstreams import upstream

SOURCES = ("wire", "gazette", "rumours")


class Source(BaseModel):
    source: str


@action("survey-sources", every=desk.sources_every, overlap="skip", retries=0, timeout="2m")
async def survey_sources(run: Run) -> dict[str, int | str]:
    """Trigger a run for each source, and wait for all of them."""
    await prepared()
    reading = [await read_source.trigger(Source(source=each), key=f"{run.id}-{each}") for each in SOURCES]
    outcomes = await asyncio.gather(*map(outcome, reading))
    return dict(zip(SOURCES, outcomes, strict=True))


async def outcome(run_id: int) -> int | str:
    """Return the number of new headlines, or the reason why it is unknown."""
    try:
        new: int = await result(run_id, timeout=60)
    except RunFailed as failure:
        return str(failure)
    except TimeoutError:
        return "it takes longer than a minute"
    return new


@action("read-source", retries=2, retry_delay="500ms", timeout="30s")
async def read_source(run: Run[Source]) -> int:
    """Read one source, and open the deals that it names for the first time."""
    source = run.payload.source
    new = 0
    for headline in await headlines(source):
        async with once(f"news-{source}", str(headline["number"])) as fresh:
            if fresh:
                values = {"source": source, "number": headline["number"], "headline": headline["headline"]}
                row = insert(Headline).values(values).on_conflict_do_nothing().returning(Headline.number)
                if await fresh.session.scalar(row):
                    await open_deal(fresh.session, headline["deal"], found_in=source)
                    new += 1
    return new


async def headlines(source: str) -> list[dict[str, Any]]:
    await limit(f"news-{source}", desk.news_rate)
    # Occasional failures are only retried. The breaker opens for a source that is down.
    async with breaker(f"news-{source}", failures=25, within="60s", rest="5s"), upstream() as client:
        found: list[dict[str, Any]] = (await client.get(f"/news/{source}")).json()
    return found
