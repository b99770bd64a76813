"""The fleet's tables, one module for each room that owns tables. The comments explain the columns.

Only the owner writes a table, and no room below the owner names it (`tests/unit/test_table_ownership.py`).

    module              owner
    cluster.py          app/fleet/cluster
    coordination.py     app/fleet/coordination
    runs.py             app/fleet/runs
    engine.py           app/fleet/engine
    once.py             app/fleet/engine/once

The views (`leader_turn`, `runnable_runs`, `worker_backlog`) are in the migration alone.

No table names its PostgreSQL schema, which is the namespace's: `Namespace.sql` or SQLAlchemy's translation map adds it.
"""

from sqlalchemy import MetaData

metadata = MetaData(
    naming_convention={
        "ix": "%(table_name)s_%(column_0_N_name)s",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "fk": "%(table_name)s_%(column_0_N_name)s_fkey",
        "pk": "%(table_name)s_pkey",
    }
)

# Importing a module registers its tables in `metadata`, which must exist by then.
from app.fleet.db.schema import cluster, coordination, engine, once, runs  # noqa: E402, F401
