"""SQLAlchemy's engine on the pool: it borrows each connection and has no pool itself."""

from collections.abc import Awaitable, Callable

import psycopg
from psycopg.rows import TupleRow
from sqlalchemy import event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool


def borrowing_engine(
    borrow: Callable[[], Awaitable[psycopg.AsyncConnection[TupleRow]]],
    report_error: Callable[[BaseException], bool],
    schema: str,
) -> AsyncEngine:
    """`report_error` returns whether the error shows an outage; SQLAlchemy then discards the connection."""
    engine = create_async_engine(
        "postgresql+psycopg://",
        async_creator=borrow,
        poolclass=NullPool,
        # It would cost a query at every checkout.
        use_native_hstore=False,
        # Error texts are stored and logged; they must not contain the values of a statement.
        hide_parameters=True,
        execution_options={"schema_translate_map": {None: schema}},
    )

    @event.listens_for(engine.sync_engine, "handle_error")
    def report(context: ExceptionContext) -> None:
        if report_error(context.original_exception):
            context.is_disconnect = True

    return engine
