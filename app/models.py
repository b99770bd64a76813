"""The service's own tables. Declare one here, then `alembic revision --autogenerate` writes its migration.

No table names a schema: it is the namespace's, put in for you.
"""

from sqlalchemy import MetaData
from sqlalchemy.orm import DeclarativeBase

metadata = MetaData()


class Base(DeclarativeBase):
    metadata = metadata
