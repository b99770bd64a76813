"""One transaction for each request: `session: InSession` in a route, and nothing to commit.

It is committed when the route's function has returned and before the first byte of the response is sent: what a client
was told happened, has. An error, the refusal of the commit included, rolls everything back and is what the client gets.
"""

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import Depends
from sqlalchemy.ext.asyncio import AsyncSession

from app.fleet.http.edge.context import InContext


async def session_of(context: InContext) -> AsyncIterator[AsyncSession]:
    async with context.database.session() as session:
        yield session


# `function`, because the default would commit after the response.
InSession = Annotated[AsyncSession, Depends(session_of, scope="function")]
