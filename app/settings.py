"""YOUR CODE: the settings of your service, beside the fleet's. Add a field; `FLOTILLA_<FIELD>` sets it."""

from app.fleet import FleetSettings


class Settings(FleetSettings):
    pass
