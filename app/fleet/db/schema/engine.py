"""Tables of `app/fleet/engine`: which instance has which actions."""

from sqlalchemy import Column, Integer, Table
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
