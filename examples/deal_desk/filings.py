"""Filings: the newest page of the feed is looked at every minute, by whichever instance has the run.

Each filing is processed once (`once`): its row, the alert about it and the run that reads its document are one
transaction, in which the key also becomes seen. Killed before that commit, nothing of it is there, and the next
attempt, or the next minute, takes it anew. Killed after it, all of it is there, and whatever happens then, those runs
run.

    a minute is left out, the feed is down     the next page has them still: it must hold what appears meanwhile
    this instance dies on the page             the run begins anew elsewhere; what it had seen is seen
    two read the page at once                  `overlap="skip"` keeps them apart; if it did not, `once` would

What it does not promise: filings that have left the page before anybody has looked. A feed with more pages than one
would be read from the page where the first filing is seen already.
"""

from pydantic import BaseModel
from sqlalchemy import update
from sqlalchemy.dialects.postgresql import insert

from app.fleet import Run, action, limit, once, trigger
from examples.deal_desk.alerts import announce
from examples.deal_desk.research import open_deal
from examples.deal_desk.settings import desk
from examples.deal_desk.tables import Filing, prepared
from examples.deal_desk.upstreams import upstream


class Listed(BaseModel):
    """A filing as the feed's page has it."""

    accession: str
    company: str
    form: str


# It is not tried again by itself: the next minute is the next attempt.
@action("watch-filings", every=desk.filings_every, overlap="skip", retries=0, timeout="5m")
async def watch_filings(_: Run) -> dict[str, int]:
    """Look at the newest filings, and process those that are new."""
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
                    await trigger(read_filing, filing, key=filing.accession, session=fresh.session)
                    new += 1
    return {"listed": len(page), "new": new}


@action("read-filing", retries=100, max_retry_delay=desk.max_retry_delay, timeout="1m")
async def read_filing(run: Run[Listed]) -> None:
    """Read a filing's document, and open the deal that it is about."""
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
