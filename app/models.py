"""YOUR CODE: the tables of your service. Declare one here; `alembic revision --autogenerate` then writes its migration.

Tables name no schema: the schema of the namespace is added for you. `Mailing` is an example, to read and to delete.
"""

from datetime import datetime
from typing import ClassVar

from sqlalchemy import BigInteger, DateTime, Identity, MetaData, Text, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

metadata = MetaData()


class Base(DeclarativeBase):
    metadata = metadata
    # `str` becomes text, and `datetime` a timestamp with time zone.
    type_annotation_map: ClassVar = {str: Text, datetime: DateTime(timezone=True)}


class Mailing(Base):
    """One message to many recipients; `app/actions/mailings.py` sends it."""

    __tablename__ = "mailings"

    id: Mapped[int] = mapped_column(BigInteger, Identity(), primary_key=True)
    subject: Mapped[str]
    recipients: Mapped[list[str]] = mapped_column(ARRAY(Text))
    created_at: Mapped[datetime] = mapped_column(server_default=text("now()"))
    # Written by the run that sends the mailing, in the transaction that completes the run.
    delivered: Mapped[int | None]
    sent_at: Mapped[datetime | None] = mapped_column(index=True)
