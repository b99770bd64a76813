"""One transaction for each request: a route declares `session: InSession`, and does not commit.

The transaction is committed after the route's function has returned and before the first byte of the response is sent,
so a response never reports what was not committed. An error rolls everything back and becomes the response; a commit
that fails is such an error.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.edge.context import InContext


async def session_of(context: InContext) -> AsyncIterator[AsyncSession]:
    async with context.database.session() as session:
        yield session


# Scope `function`: with the default scope, the commit would come after the response.
InSession = Annotated[AsyncSession, Depends(session_of, scope="function")]
