"""Alembic's entry point: migrates the namespace's schema, on the given connection or on one from the settings.

The `search_path` is the namespace's schema, so migrations name no schema. Waiting for a lock is bounded, because all
later queries queue behind a migration that waits for a table lock.
"""

from sqlalchemy import Connection, create_engine, text

from alembic import context
from app.fleet.db import dsn
from app.fleet.db.migrations import alembic_session
from app.fleet.db.namespace import Namespace
from app.fleet.db.schema import metadata as fleet_metadata
from app.models import metadata as app_metadata
from app.settings import Settings


def run(connection: Connection, namespace: Namespace) -> None:
    connection.execute(text(f'CREATE SCHEMA IF NOT EXISTS "{namespace.schema}"'))
    connection.execute(text(f'SET search_path TO "{namespace.schema}"'))
    connection.execute(text("SET lock_timeout TO '10s'"))
    connection.commit()
    connection.dialect.default_schema_name = namespace.schema
    context.configure(
        connection=connection,
        target_metadata=[fleet_metadata, app_metadata],
        compare_server_default=True,
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes
if "connection" in given:
    run(given["connection"], given["namespace"])
else:
    settings = Settings.load()
    addresses = dsn.resolve(settings)
    own = Namespace(settings.namespace)
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: alembic_session(addresses.direct, own),
    )
    with engine.connect() as connection:
        run(connection, own)
    engine.dispose()
