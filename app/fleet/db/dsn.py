"""Where the database is: the pool's address, the direct one, and what every connection is told.

`connect_timeout` and the TCP timers are short, because psycopg's own defaults (130 s, none) turn a lost packet into an
outage. An address that names them itself is left alone. `target_session_attrs=read-write` is added unless the address
says otherwise: with several hosts it finds the primary, with one it turns a demoted primary into a clear error.
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
# How much of a run id is in the name of a session.
RUN_DIGITS = 16

# The only isolation level the fleet's statements are written for, as the value of an option: its space is escaped.
READ_COMMITTED = r"read\ committed"


@dataclass(frozen=True)
class Addresses:
    """`pool` may lead through a pooler; `direct` leads to PostgreSQL itself."""

    pool: str = field(repr=False)
    direct: str = field(repr=False)
    pooled: bool

    @property
    def place(self) -> str:
        """The direct address as one may show it."""
        return place(self.direct)


def resolve(settings: FleetSettings) -> Addresses:
    """Return where the database is, starting the embedded one if none was named."""
    if settings.database_url is None:
        address = embedded.ensure_running(settings.embedded_dir)
        return Addresses(complete(address), complete(address), pooled=False)
    pool = complete(settings.database_url.get_secret_value())
    direct = settings.database_direct_url
    return Addresses(pool, complete(direct.get_secret_value()) if direct else pool, pooled=settings.pooled)


def complete(address: str) -> str:
    """Add our timers to an address, in whatever form it was given."""
    try:
        given = conninfo_to_dict(DRIVER.sub(r"\1://", address))
    except ProgrammingError as error:
        # libpq quotes the address in its message, password included: never pass it on.
        raise SettingsError(
            "DATABASE_URL or DATABASE_DIRECT_URL is not an address PostgreSQL understands; the form is "
            "postgresql://user:password@host:5432/database"
        ) from error.with_traceback(None)
    return make_conninfo("", **(TIMERS | given))


def with_options(address: str, *, application: str, **options: str | int) -> str:
    """Name the session, and set server parameters for it."""
    given = conninfo_to_dict(address)
    flags = [str(given.get("options") or "")] + [f"-c {name}={value}" for name, value in options.items()]
    return make_conninfo(address, application_name=application[:63], options=" ".join(filter(None, flags)))


def pool_application(namespace: Namespace, run_id: UUID | None = None) -> str:
    """Name the pool's sessions of one start of an instance, by which the leader finds them when it is frozen.

    Without a run id, the beginning of each such name. It is never longer than the 63 letters PostgreSQL keeps.
    """
    name = namespace.name[: 63 - len("flotilla//pool/") - RUN_DIGITS]
    return f"flotilla/{name}/pool/{run_id.hex[:RUN_DIGITS] if run_id else ''}"


def place(address: str) -> str:
    """Say where an address leads, without its password."""
    given = conninfo_to_dict(address)
    host = given.get("host") or given.get("hostaddr") or "the local socket"
    port = f":{given['port']}" if given.get("port") else ""
    return f"{host}{port}/{given.get('dbname') or given.get('user') or ''}"
