"""The database: bring its schema up to date, and say whether this wiring is safe."""

import dataclasses
import sys

from app.fleet.cli.doctor import Level, examine
from app.fleet.cli.terminal import AsJson, load, say, say_json
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.namespace import Namespace
from app.fleet.telemetry import logs


def migrate() -> None:
    """Bring the namespace's schema to the newest revision. Safe to run anywhere, any number of times at once."""
    settings = load()
    logs.set_up(as_json=settings.logs_as_json, level=settings.log_level, namespace=settings.namespace)
    addresses = dsn.resolve(settings)
    preflight.check_direct(addresses)
    done = migrations.migrate(addresses.direct, Namespace(settings.namespace))
    say(f"{settings.namespace}: {'migrated' if done else 'current already'}")


def doctor(as_json: AsJson = False) -> None:
    """Say whether this wiring is safe: database, pooler, schema, connection budget, clock, privileges, settings."""
    findings = examine(load())
    if as_json:
        say_json([dataclasses.asdict(finding) for finding in findings])
    else:
        for finding in findings:
            say(f"{finding.level.value:<7}  {finding.subject:<20}  {finding.detail}")
    if any(finding.level is Level.PROBLEM for finding in findings):
        sys.exit(1)
