"""YOUR CODE: the service's own tables. Declare one here, then `alembic revision --autogenerate` writes its migration.

No table names a schema: it is the namespace's, put in for you. `Mailing` is an example, to read and to delete.
"""

from datetime import datetime
from typing import ClassVar

from sqlalchemy import BigInteger, DateTime, Identity, MetaData, Text, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

metadata = MetaData()


class Base(DeclarativeBase):
    metadata = metadata
    # A plain `str` or `datetime` is what PostgreSQL does best.
    type_annotation_map: ClassVar = {str: Text, datetime: DateTime(timezone=True)}


class Mailing(Base):
    """One subject for many recipients; `app/actions/mailings.py` sends it."""

    __tablename__ = "mailings"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    subject: Mapped[str]
    recipients: Mapped[list[str]] = mapped_column(ARRAY(Text))
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    # Written by the run that sent it, in the transaction that completed that run.
    delivered: Mapped[int | None]
    sent_at: Mapped[datetime | None] = mapped_column(index=True)
