"""What makes N instances of one service safe, on PostgreSQL alone.

This page is the public API. A service author imports from here; everything below may change.
"""

from app.fleet.errors import FleetError
from app.fleet.settings import FleetSettings

__all__ = ["FleetError", "FleetSettings"]
