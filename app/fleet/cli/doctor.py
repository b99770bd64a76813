"""The checks of `flotilla doctor`: all that needs no running instance. Each finding says what to do about it.

A `problem` prevents an instance from starting, or makes it unsafe. A `warning` may cause trouble later. A check that
finds nothing reports `ok`, so that the operator sees what was checked.
"""

import enum
import importlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import psycopg

from app.fleet.cluster.anomalies import ALLOWED_CONNECTIONS, over_budget
from app.fleet.cluster.member import sessions
from app.fleet.cluster.registry import Registry, Session
from app.fleet.db import dsn, migrations, preflight
from app.fleet.db.direct import open_session
from app.fleet.db.namespace import Namespace, Statement
from app.fleet.db.schema import metadata
from app.fleet.db.schema.cluster import instance_ids, instance_numbers
from app.fleet.db.schema.once import once_tokens
from app.fleet.errors import DatabaseError
from app.fleet.settings import FleetSettings
from app.fleet.telemetry.redaction import redact

MAX_CLOCK_OFFSET = 2.0
MAX_MISSING_SHOWN = 5

MAY_MIGRATE = Statement("SELECT has_schema_privilege('{channel}', 'CREATE')")

# One row per privilege: has_table_privilege() with a list of privileges is true if the role has any of them.
MISSING = Statement("""
SELECT 'USAGE on the schema'
WHERE NOT has_schema_privilege('{channel}', 'USAGE')
UNION ALL
SELECT p.privilege || ' on ' || c.relname
FROM pg_catalog.pg_class AS c
CROSS JOIN unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS p (privilege)
WHERE c.relnamespace = '{channel}'::regnamespace AND c.relname = ANY(%(tables)s)
  AND NOT has_table_privilege(c.oid, p.privilege)
UNION ALL
SELECT 'UPDATE on leader_turn'
FROM pg_catalog.pg_class AS c
WHERE c.relnamespace = '{channel}'::regnamespace AND c.relname = 'leader_turn'
  AND NOT has_table_privilege(c.oid, 'UPDATE')
UNION ALL
SELECT 'USAGE on ' || c.relname
FROM pg_catalog.pg_class AS c
WHERE c.relnamespace = '{channel}'::regnamespace AND c.relname = ANY(%(sequences)s)
  AND NOT has_sequence_privilege(c.oid, 'USAGE')
""")


class Level(enum.StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    level: Level
    subject: str
    detail: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "detail", redact(self.detail))


ok = partial(Finding, Level.OK)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def examine(settings: FleetSettings, instances: int | None = None) -> list[Finding]:
    findings = list(check_settings(settings))
    try:
        addresses = dsn.resolve(settings)
        preflight.check_direct(addresses)
    except DatabaseError as error:
        return [*findings, problem("database", str(error))]
    findings.append(
        ok("database", f"{addresses.location} is writable, its version is supported, and the connection is direct")
    )
    namespace = Namespace(settings.namespace)
    try:
        with open_session(addresses.direct, application=namespace.application("doctor"), lease=None) as session:
            for check in (check_schema, check_clock, check_privileges, check_budget):
                findings += check(session, namespace, settings)
            if instances is not None:
                findings += check_maximum(session, settings, instances)
    except psycopg.Error as error:
        findings.append(problem("database", str(preflight.translate(error, addresses))))
    return [*findings, *check_route(addresses)]


def check_settings(settings: FleetSettings) -> Iterator[Finding]:
    yield ok("settings", f"environment {settings.environment}, namespace {settings.namespace}")
    if getattr(importlib.import_module("app.startup"), "sign_in", None) is not None:
        yield ok("sign-in", "the service's own, in app/startup.py")
    elif not settings.api_keys and settings.production:
        yield problem("api keys", "none are set, and there is no sign-in in app/startup.py: no instance starts")
    elif not settings.api_keys:
        yield warning("api keys", "none are set: all callers may read and operate (development only)")
    if settings.embedded:
        yield warning("embedded database", "for development only: set DATABASE_URL before you deploy")


def check_schema(session: Session, namespace: Namespace, settings: FleetSettings) -> Iterator[Finding]:
    try:
        state = migrations.inspect(session, namespace)
    except DatabaseError as error:
        yield problem("schema", str(error))
        return
    if state is migrations.State.CURRENT:
        yield ok("schema", f"{namespace.schema} is up to date")
    elif state is migrations.State.AHEAD:
        yield warning("schema", f"{namespace.schema} is ahead: a newer release has migrated it")
    elif settings.migrates_on_start:
        yield ok("schema", f"{namespace.schema} is {state.value}; the next instance that starts migrates it")
    else:
        yield problem("schema", f"{namespace.schema} is {state.value}: run `flotilla migrate`")


def check_clock(session: Session, _: Namespace, __: FleetSettings) -> Iterator[Finding]:
    sent = time.time()
    row = session.execute("SELECT extract(epoch FROM clock_timestamp())::float8").fetchone()
    assert row is not None
    offset = row[0] - (sent + time.time()) / 2
    if abs(offset) > MAX_CLOCK_OFFSET:
        yield warning(
            "clock",
            f"the clocks of this machine and of PostgreSQL differ by {offset:+.1f} s: nothing breaks, because only "
            f"PostgreSQL's clock is used, but the times in the logs do not match; check NTP",
        )
    else:
        yield ok("clock", f"{offset * 1000:+.0f} ms from PostgreSQL's clock")


def check_privileges(session: Session, namespace: Namespace, _: FleetSettings) -> Iterator[Finding]:
    if migrations.inspect(session, namespace) is migrations.State.ABSENT:
        row = session.execute("SELECT has_database_privilege(current_database(), 'CREATE')").fetchone()
        if row != (True,):
            yield problem(
                "privileges",
                f"this role may not create the schema {namespace.schema}: GRANT CREATE ON DATABASE, or migrate with "
                f"another role",
            )
        else:
            yield ok("privileges", "enough to create the schema")
        return
    names = {
        "tables": [table.name for table in metadata.tables.values()],
        "sequences": [sequence.name for sequence in (instance_ids, instance_numbers, once_tokens)],
    }
    missing = [name for (name,) in session.execute(namespace.sql(MISSING), names)]
    if missing:
        more = f" and {len(missing) - MAX_MISSING_SHOWN} more" if len(missing) > MAX_MISSING_SHOWN else ""
        yield problem(
            "privileges", f"this role lacks {', '.join(missing[:MAX_MISSING_SHOWN])}{more}: see docs/guides/deploy.md"
        )
    elif session.execute(namespace.sql(MAY_MIGRATE)).fetchone() == (False,):
        yield ok("privileges", "enough to run, but not to migrate (least privilege)")
    else:
        yield ok("privileges", "enough to run and to migrate")


def check_budget(session: Session, namespace: Namespace, settings: FleetSettings) -> Iterator[Finding]:
    row = session.execute(ALLOWED_CONNECTIONS).fetchone()
    assert row is not None
    allowed = int(row[0])
    each = sessions(settings)
    absent = migrations.inspect(session, namespace) is migrations.State.ABSENT
    living = [] if absent else [row for row in Registry(namespace).list(session) if row.live]
    for anomaly in over_budget(living, allowed):
        yield warning("connection budget", anomaly.detail)
        return
    used = sum(instance.connections for instance in living)
    yield ok(
        "connection budget",
        f"{len(living)} living instances may open {used} of {allowed} sessions; there is room for "
        f"{max(0, (allowed - used) // each)} more instances with these settings ({each} sessions each)",
    )


def check_maximum(session: Session, settings: FleetSettings, instances: int) -> Iterator[Finding]:
    """Check whether the server allows as many instances as an autoscaler may start."""
    row = session.execute(ALLOWED_CONNECTIONS).fetchone()
    assert row is not None
    allowed, each = int(row[0]), sessions(settings)
    needed = instances * each
    finding = problem if needed > allowed else ok
    yield finding(
        "maximum",
        f"{instances} instances with these settings may open {needed} of {allowed} sessions ({each} each)"
        + (
            f": lower the maximum to {allowed // each} or FLOTILLA_POOL_MAX, raise max_connections, or put a pooler in "
            f"front of DATABASE_URL"
            if needed > allowed
            else ""
        ),
    )


def check_route(addresses: dsn.Addresses) -> Iterator[Finding]:
    """Check the connection of the pool to PostgreSQL, which may lead through a pooler."""
    try:
        route = preflight.check_pool(addresses)
    except DatabaseError as error:
        yield problem("pool", str(error))
        return
    if addresses.pooled:
        detail = "DATABASE_URL leads through a pooler, DATABASE_DIRECT_URL does not"
        without = "none: both addresses lead to PostgreSQL directly"
        yield ok("pooler", detail if route.through_pooler else without)
    yield ok(
        "isolation",
        f"the default is {route.default_isolation}"
        + ("" if route.default_isolation == "read committed" else "; the fleet's own sessions set read committed"),
    )
    for place in route.unencrypted:
        yield warning(
            "encryption",
            f"{place} is another machine, and the connection has no TLS: the network can read the password and all "
            f"data; add sslmode=verify-full to the address",
        )
    if not route.unencrypted:
        yield ok("encryption", "the database is on this machine, or the connection has TLS")
