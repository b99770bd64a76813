"""The tables of the desk. Each key that must be unique is a primary key or a unique constraint.

They are a second safeguard. `once`, keys of runs and tokens already prevent that anything is done twice. If one of them
were removed or misused, or had forgotten a key after its retention, `INSERT … ON CONFLICT DO NOTHING` would return no
row, and the consequences of that row would not follow.

The tables have their own schema (`DESK_DATABASE_SCHEMA`), because `app/models.py` and its migrations belong to the
service. `prepared` creates them at first use, in one transaction under an advisory lock, so that only one of several
starting instances creates them. A service of your own has models and migrations instead.
"""

from datetime import datetime
from typing import Any, ClassVar

from sqlalchemy import BigInteger, DateTime, ForeignKey, Identity, MetaData, Text, UniqueConstraint, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateSchema

from app.fleet import transaction
from examples.deal_desk.settings import desk

NOW = text("now()")


class Base(DeclarativeBase):
    metadata = MetaData(schema=desk.database_schema)
    type_annotation_map: ClassVar = {str: Text, datetime: DateTime(timezone=True), dict[str, Any]: JSONB}


class Filing(Base):
    __tablename__ = "filings"

    accession: Mapped[str] = mapped_column(primary_key=True)
    company: Mapped[str]
    form: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    # Set when the document has been read.
    deal: Mapped[str | None]


class Halt(Base):
    __tablename__ = "halts"

    halt: Mapped[str] = mapped_column(primary_key=True)
    company: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    # The token of the turn that found it. Tokens only grow.
    token: Mapped[int] = mapped_column(BigInteger)


class Headline(Base):
    __tablename__ = "headlines"

    source: Mapped[str] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    headline: Mapped[str]


class Deal(Base):
    __tablename__ = "deals"

    deal: Mapped[str] = mapped_column(primary_key=True)
    found_in: Mapped[str]
    opened_at: Mapped[datetime] = mapped_column(server_default=NOW)


class Payment(Base):
    """The payment for the research on a deal, inserted before the first call; later also its report."""

    __tablename__ = "research_payments"

    deal: Mapped[str] = mapped_column(ForeignKey(Deal.deal), primary_key=True)
    intended_at: Mapped[datetime] = mapped_column(server_default=NOW)
    calls: Mapped[int]
    charge: Mapped[str | None] = mapped_column(unique=True)
    report: Mapped[dict[str, Any] | None]


class Alert(Base):
    """An alert; there is one per kind and subject."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("kind", "subject"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    kind: Mapped[str]
    subject: Mapped[str]
    message: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    # Set after the chat has confirmed the alert, in the transaction that ends the run.
    delivered_at: Mapped[datetime | None]
    attempts: Mapped[int | None]


async def prepared() -> None:
    """Create the tables, if they do not exist."""
    async with transaction() as session:
        last_table = f"{desk.database_schema}.{Alert.__tablename__}"
        if await session.scalar(text("SELECT to_regclass(:name)"), {"name": last_table}) is not None:
            return
        await session.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": last_table})
        await session.execute(CreateSchema(desk.database_schema, if_not_exists=True))
        connection = await session.connection()
        await connection.run_sync(Base.metadata.create_all)
