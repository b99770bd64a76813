"""Tables of `app/fleet/engine`: which instance has which actions, and what happened to runs in each minute."""

from sqlalchemy import BigInteger, Column, DateTime, Float, Integer, PrimaryKeyConstraint, Table, text
from sqlalchemy.dialects.postgresql import ARRAY

from app.fleet.db.schema import metadata

# The actions in the code of each live instance. It schedules them and, unless its role is `web`, claims their runs.
# Deleted when the instance is declared gone.
standby = Table(
    "standby",
    metadata,
    Column("instance_id", Integer, primary_key=True, autoincrement=False),
    Column("action_ids", ARRAY(Integer), nullable=False),
)

# What happened to runs of an action within a minute: the sums of all instances, kept for a day (`run_minutes.py`).
run_minutes = Table(
    "run_minutes",
    metadata,
    Column("minute", DateTime(timezone=True), nullable=False),
    # 0 stands for all actions: such a row has the backlog only.
    Column("action_id", Integer, nullable=False),
    # The attempts that ended, by outcome, and how long their actions ran, as a sum.
    Column("succeeded", BigInteger, nullable=False, server_default=text("0")),
    Column("failed", BigInteger, nullable=False, server_default=text("0")),
    Column("cancelled", BigInteger, nullable=False, server_default=text("0")),
    Column("retried", BigInteger, nullable=False, server_default=text("0")),
    Column("paused", BigInteger, nullable=False, server_default=text("0")),
    Column("work_seconds", Float, nullable=False, server_default=text("0")),
    # The first attempts that began, and how long their runs had waited since they were due: the sum and the maximum.
    Column("begun", BigInteger, nullable=False, server_default=text("0")),
    Column("waited_seconds", Float, nullable=False, server_default=text("0")),
    Column("longest_wait_seconds", Float, nullable=False, server_default=text("0")),
    # How many runs could begin, and for how long the oldest had been due; null if the leader has not written it.
    Column("waiting", BigInteger),
    Column("oldest_seconds", Float),
    PrimaryKeyConstraint("minute", "action_id"),
    # The row of the present minute is updated often, and no index entry with it.
    postgresql_with={"fillfactor": "50"},
)
