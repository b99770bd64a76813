"""Filings: every minute, the instance that has the run polls the newest page of the feed.

Each filing is processed once (`once`): one transaction inserts its row, orders its alert, triggers the run that reads
its document, and marks its key as seen. If the process dies before that commit, nothing of it exists, and the next
attempt or the next minute processes the filing. If it dies after the commit, all of it exists, and the runs execute.

    a poll is missed, or the feed is down      the next page must still have the filings
    this instance dies while it polls          the run begins again elsewhere; seen filings stay seen
    two polls at the same time                 prevented by `overlap="skip"`; otherwise `once` would separate them

Not guaranteed: filings that leave the page before a poll. For a feed with several pages, read them until the first
filing that is already seen.
"""

from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.dialects.postgresql import insert

from app.fleet import Run, action, limit, once
from examples.deal_desk.alerts import announce
from examples.deal_desk.research import open_deal
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Filing, prepared
from examples.deal_desk.upstreams import upstream


class Listed(BaseModel):
    """A filing as listed on the page of the feed."""

    accession: str
    company: str
    form: str


# No retries: the run of the next minute is the next attempt.
@action("watch-filings", every=desk.filings_every, overlap="skip", retries=0, timeout="5m")
async def watch_filings(_: Run) -> dict[str, int]:
    """Poll the newest filings, and process the new ones."""
    await prepared()
    page = await newest_page()
    new = 0
    for filing in reversed(page):
        async with once("filings", filing.accession) as fresh:
            if fresh:
                row = insert(Filing).values(filing.model_dump()).on_conflict_do_nothing().returning(Filing.accession)
                if await fresh.session.scalar(row):
                    message = f"{filing.company} has filed {filing.form}"
                    await announce(fresh.session, "filing", filing.accession, message)
                    await read_filing.trigger(filing, key=filing.accession, session=fresh.session)
                    new += 1
    return {"listed": len(page), "new": new}


@action("read-filing", retries=100, max_retry_delay=desk.max_retry_delay, timeout="1m")
async def read_filing(run: Run[Listed]) -> None:
    """Read the document of a filing, and open its deal."""
    filing = run.payload
    await limit("edgar", desk.edgar_rate)
    async with upstream() as client:
        document = (await client.get(f"/edgar/filings/{filing.accession}")).json()
    async with run.commit({"deal": document["deal"]}) as session:
        read = update(Filing).where(Filing.accession == filing.accession).values(deal=document["deal"])
        await session.execute(read)
        await open_deal(session, document["deal"], found_in=f"filing {filing.accession}")


async def newest_page() -> list[Listed]:
    await limit("edgar", desk.edgar_rate)
    async with upstream() as client:
        return [Listed.model_validate(each) for each in (await client.get("/edgar/latest")).json()]
