"""The executor: claims runs and runs them. A service with nothing to do yet; its place in the shutdown is fixed."""

from app.fleet.service import Service


class Executor(Service):
    name = "executor"
