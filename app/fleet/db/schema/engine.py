"""Tables of `app/fleet/engine`: which instance runs which actions."""

from sqlalchemy import Column, Integer, Table
from sqlalchemy.dialects.postgresql import ARRAY

from app.fleet.db.schema import metadata

# The actions in the code of each live instance, which it schedules and claims. Deleted when it is declared gone.
standby = Table(
    "standby",
    metadata,
    Column("instance_id", Integer, primary_key=True, autoincrement=False),
    Column("action_ids", ARRAY(Integer), nullable=False),
)
