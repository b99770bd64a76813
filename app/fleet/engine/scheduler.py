"""The scheduler: decides that a run is due. A service with nothing to do yet; its place in the shutdown is fixed."""

from app.fleet.service import Service


class Scheduler(Service):
    name = "scheduler"
