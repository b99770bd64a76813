"""The service's own settings, beside the fleet's: add a field, and `FLOTILLA_<FIELD>` sets it."""

from app.fleet.settings import FleetSettings


class Settings(FleetSettings):
    pass
