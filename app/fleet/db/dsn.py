"""The addresses of the database, for the pool and for direct sessions, and the settings of every connection.

`connect_timeout` and the TCP timers are short, because psycopg's defaults (130 s, none) turn a lost packet into an
outage. They are not changed if the address names them. Unless the address says otherwise,
`target_session_attrs=read-write` is added: with several hosts it finds the primary, and with one host it turns a
demoted primary into a clear error.
"""

import re
from dataclasses import dataclass, field
from uuid import UUID

from psycopg import ProgrammingError
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from app.fleet.db import embedded
from app.fleet.db.namespace import Namespace
from app.fleet.errors import SettingsError
from app.fleet.settings import FleetSettings

DRIVER = re.compile(r"^(postgres(?:ql)?)\+\w+://")
TIMERS = {"connect_timeout": "2", "keepalives": "1", "keepalives_idle": "2", "keepalives_interval": "1"}
TIMERS |= {"keepalives_count": "3", "tcp_user_timeout": "2500", "target_session_attrs": "read-write"}
# The number of digits of the run id in the name of a pool session.
RUN_DIGITS = 16
# The limit on idle transactions if `STATEMENT_TIMEOUT` is 0, which removes the limit on statements only.
IDLE_IN_TRANSACTION = 30.0

# The isolation level that the fleet's statements are written for, as the value of an option: its space is escaped.
READ_COMMITTED = r"read\ committed"


@dataclass(frozen=True)
class Addresses:
    """`pool` may lead through a pooler; `direct` leads to PostgreSQL itself."""

    pool: str = field(repr=False)
    direct: str = field(repr=False)
    pooled: bool

    @property
    def location(self) -> str:
        """The direct address without its password."""
        return location(self.direct)


def resolve(settings: FleetSettings, *, start: bool = True) -> Addresses:
    """Return the addresses from the settings; without any, that of the embedded database.

    It is started if necessary, and with `start=False` it must be running already.
    """
    if settings.database_url is None:
        find = embedded.ensure_running if start else embedded.address_if_running
        address = find(settings.embedded_dir)
        return Addresses(complete(address), complete(address), pooled=False)
    pool = complete(settings.database_url.get_secret_value())
    direct = settings.database_direct_url
    return Addresses(pool, complete(direct.get_secret_value()) if direct else pool, pooled=settings.pooled)


def complete(address: str) -> str:
    """Return the address in the form of libpq, with our timers."""
    try:
        given = conninfo_to_dict(DRIVER.sub(r"\1://", address))
    except ProgrammingError as error:
        # libpq's message contains the address with its password: never pass it on.
        raise SettingsError(
            "DATABASE_URL or DATABASE_DIRECT_URL is not an address PostgreSQL understands; the form is "
            "postgresql://user:password@host:5432/database"
        ) from error.with_traceback(None)
    return make_conninfo("", **(TIMERS | given))


def with_options(address: str, *, application: str, **options: str | int) -> str:
    """Add the name of the session and server parameters."""
    given = conninfo_to_dict(address)
    flags = [str(given.get("options") or "")] + [f"-c {name}={value}" for name, value in options.items()]
    return make_conninfo(address, application_name=application, options=" ".join(filter(None, flags)))


def pool_application(namespace: Namespace, run_id: UUID | None = None) -> str:
    """Return the name of the pool's sessions of one process, by which the leader finds them if the process freezes.

    Without a run id, return what all these names begin with. The name has at most the 63 bytes that PostgreSQL keeps.
    """
    name = namespace.name[: 63 - len("flotilla//pool/") - RUN_DIGITS]
    return f"flotilla/{name}/pool/{run_id.hex[:RUN_DIGITS] if run_id else ''}"


def pool_conninfo(addresses: Addresses, settings: FleetSettings, namespace: Namespace, run_id: UUID) -> str:
    """Return the pool's address with the settings that the fleet relies on, whatever the server's defaults are.

    Behind a pooler nothing can be set for a session; `preflight` checks what must hold there.
    """
    if addresses.pooled:
        return addresses.pool
    limit = settings.statement_timeout
    return with_options(
        addresses.pool,
        application=pool_application(namespace, run_id),
        default_transaction_isolation=READ_COMMITTED,
        statement_timeout=int(limit * 1000),
        # Always limited: an instance that freezes in a guarded transaction must not block a takeover without end.
        idle_in_transaction_session_timeout=int((limit or IDLE_IN_TRANSACTION) * 1000),
        # Neither timeout ends a backend that sends an answer to a client that does not read.
        tcp_user_timeout=int(limit * 1000),
        # The pool keeps idle connections on purpose.
        idle_session_timeout=0,
        client_connection_check_interval=1000,
    )


def location(address: str) -> str:
    """Return host, port and database of an address, without its password."""
    given = conninfo_to_dict(address)
    host = given.get("host") or given.get("hostaddr") or "the local socket"
    port = f":{given['port']}" if given.get("port") else ""
    return f"{host}{port}/{given.get('dbname') or given.get('user') or ''}"
