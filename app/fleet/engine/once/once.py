"""`once` and `once_many`: process a key once.

    async with once("filings", filing.accession) as fresh:
        if fresh:
            await research_filing.trigger(filing, session=fresh.session)

The block is fresh if it has taken the key. Then no other block gets the key, until this one ends. If the block ends
without an exception, the key becomes `seen`; otherwise it is free again, and the next block is fresh.

    block.py            takes the keys, and marks or releases them at the end
    statements.py       guarantees that one block gets a key
    housekeeping.py     prunes old keys; reports keys that stay pending

Not guaranteed: that the body runs once. It may be killed after an effect outside the database, and an owner that was
declared gone may still execute it. Nor that a `pending` key becomes `seen`: a caller that gets `pending` tries later.
"""

from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import ContextVar

from app.fleet.duration import Duration
from app.fleet.engine.once.block import Batch, Fresh, SeenStore
from app.fleet.errors import FleetError

# The store that `once` uses: set for each request and each attempt.
current: ContextVar[SeenStore] = ContextVar("flotilla_seen_store")


@asynccontextmanager
async def once(scope: str, key: str, keep: Duration = "7d") -> AsyncIterator[Fresh]:
    """Process a key once: yields an object that is true if this block has the key. Seen when the block succeeds."""
    async with current_store().block(scope, [key], keep) as batch:
        yield Fresh(batch)


def once_many(scope: str, keys: Iterable[str], keep: Duration = "7d") -> AbstractAsyncContextManager[Batch]:
    """The same for up to a thousand keys: this block has those in `fresh`, and marks them in one transaction."""
    return current_store().block(scope, keys, keep)


def current_store() -> SeenStore:
    try:
        return current.get()
    except LookupError:
        raise FleetError(
            "once() and once_many() are for the code of a running service: a route, or an async action"
        ) from None
