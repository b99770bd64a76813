"""What the desk remembers. Every key that must not come twice is a primary key or a unique constraint.

They are the second belt. `once`, keys of runs and tokens see to it that nothing is done twice; should one of them be
taken out, misused, or have forgotten after its retention, an `INSERT … ON CONFLICT DO NOTHING` that returns no row says
so, and what would have followed from the row does not follow.

The tables are in a schema of their own (`DESK_DATABASE_SCHEMA`), because `app/models.py` and its migrations belong to
the service. `prepared` makes them at first use: all in one transaction, under an advisory lock, so that however many
instances begin at once, one of them makes all. A service of your own has models and migrations instead.
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
    # Known when the document was read.
    deal: Mapped[str | None]


class Halt(Base):
    __tablename__ = "halts"

    halt: Mapped[str] = mapped_column(primary_key=True)
    company: Mapped[str]
    seen_at: Mapped[datetime] = mapped_column(server_default=NOW)
    # Of the turn that saw it: they only ever grow.
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
    """That a deal's research is to be paid for, written before the first call; its report, once there is one."""

    __tablename__ = "research_payments"

    deal: Mapped[str] = mapped_column(ForeignKey(Deal.deal), primary_key=True)
    intended_at: Mapped[datetime] = mapped_column(server_default=NOW)
    calls: Mapped[int]
    charge: Mapped[str | None] = mapped_column(unique=True)
    report: Mapped[dict[str, Any] | None]


class Alert(Base):
    """Something to tell, once for each subject of its kind."""

    __tablename__ = "alerts"
    __table_args__ = (UniqueConstraint("kind", "subject"),)

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    kind: Mapped[str]
    subject: Mapped[str]
    message: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=NOW)
    # Written after the chat has said that it has it, in the transaction that ends the run.
    delivered_at: Mapped[datetime | None]
    attempts: Mapped[int | None]


async def prepared() -> None:
    """See to it that the tables are there."""
    async with transaction() as session:
        one_of_them = f"{desk.database_schema}.{Alert.__tablename__}"
        if await session.scalar(text("SELECT to_regclass(:name)"), {"name": one_of_them}) is not None:
            return
        await session.execute(text("SELECT pg_advisory_xact_lock(hashtext(:name))"), {"name": one_of_them})
        await session.execute(CreateSchema(desk.database_schema, if_not_exists=True))
        connection = await session.connection()
        await connection.run_sync(Base.metadata.create_all)
