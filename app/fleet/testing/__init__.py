"""The testing kit: run the service in the test process, and test your own actions and routes on a real PostgreSQL.

    fixtures.py      the fixtures for pytest; only this module imports pytest
    instance.py      what a test does with an instance: requests, runs, time
    survival.py      one round for each point at which an attempt can die
    worker.py        executes attempts, and dies
    faults.py        the points at which an attempt can die or lose its run
    clock.py         moves time, by moving rows
    stored.py        runs as the database has them
    databases.py     a server for the tests, and a database for each

docs/guides/test.md is the guide. Nothing here is imported by the service.
"""

from app.fleet.engine.actions.recorded import RecordedRun
from app.fleet.testing.faults import Fault, Point, dies_at, overtaken_at, reach
from app.fleet.testing.instance import Instance
from app.fleet.testing.stored import StoredRun

__all__ = ["Fault", "Instance", "Point", "RecordedRun", "StoredRun", "dies_at", "overtaken_at", "reach"]
