"""All settings of the fleet, in one frozen object: read once at the start, checked together, refused as a whole.

Each setting is an environment variable with the prefix `FLOTILLA_`, a line in `.env`, or a file in the directory
`FLOTILLA_SECRETS_DIR`, in this order. `DATABASE_URL` and `DATABASE_DIRECT_URL` also work without the prefix, because
platforms provide them so. An unknown `FLOTILLA_` name is an error: otherwise a typing error would silently leave the
default in place, and be found in production.

`docs/reference/settings.md` says what each setting means. Durations are in seconds, sizes in bytes. A service adds its
own settings in a subclass (`app/settings.py`).
"""

import difflib
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from dotenv import dotenv_values
from pydantic import AliasChoices, Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.fleet.api_keys import KEY
from app.fleet.errors import SettingsError
from app.fleet.role import Role
from app.fleet.telemetry import redaction

PREFIX = "FLOTILLA_"
NAME = re.compile(r"[a-z][a-z0-9-]{0,62}")
VERSION = re.compile(r"[!-~]{1,100}")
# The origin of a web page, as browsers send it: without a path, and without the port if it is the usual one.
ORIGIN = re.compile(r"https?://[a-z0-9.-]{1,253}(:[0-9]{1,5})?|https?://\[[0-9a-f:.]{2,45}\](:[0-9]{1,5})?")
USUAL_PORTS = {"http:": ":80", "https": ":443"}
WEB_ADDRESS = re.compile(r"https?://[!-~]{1,2000}")
# What `trace_url` has instead of the id of a trace.
TRACE_ID = "{trace_id}"
PASSWORD = re.compile(r"\bpassword\s*=\s*(?:'((?:[^'\\]|\\.)*)'|(\S+))")
# Seconds that all steps of the shutdown other than drain and pause may take together.
STEPS_RESERVE = 17.0
# Seconds before the end of the grace period at which the watchdog ends the process.
WATCHDOG_RESERVE = 3.0

Seconds = Annotated[float, Field(ge=0, le=3600)]
Timeout = Annotated[float, Field(ge=1, le=3600)]


class FleetSettings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_file=".env", env_ignore_empty=True, extra="ignore", frozen=True, populate_by_name=True
    )

    secrets_dir: Path | None = None
    environment: Literal["development", "production"] = "development"
    namespace: str = "flotilla"
    role: Role = Role.ALL
    version: str | None = None
    instance_name: str | None = None
    workspace: str | None = None
    workspace_force: bool = False

    database_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("FLOTILLA_DATABASE_URL", "DATABASE_URL")
    )
    database_direct_url: SecretStr | None = Field(
        default=None, validation_alias=AliasChoices("FLOTILLA_DATABASE_DIRECT_URL", "DATABASE_DIRECT_URL")
    )
    embedded_dir: Path = Path(".flotilla/postgresql")
    pool_min: int = Field(default=2, ge=1, le=1000)
    pool_max: int = Field(default=10, ge=1, le=1000)
    pool_timeout: Annotated[float, Field(gt=0, le=300)] = 5.0
    statement_timeout: Seconds = 30.0
    migrate_on_start: bool | None = None
    migrate_wait: Seconds = 60.0

    actions: Annotated[tuple[str, ...], NoDecode] = ("app.actions",)
    concurrency: int = Field(default=100, ge=1, le=100_000)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    api_keys: Annotated[tuple[SecretStr, ...], NoDecode] = ()
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    trusted_proxies: Annotated[tuple[str, ...], NoDecode] = ()
    max_body: int = Field(default=1_048_576, ge=1024)
    max_header: int = Field(default=65_536, ge=4096, le=1_048_576)
    connections: int = Field(default=4096, ge=16, le=1_000_000)
    header_timeout: Timeout = 10.0
    transfer_timeout: Timeout = 30.0
    idle_timeout: Timeout = 75.0
    streams: int = Field(default=2000, ge=1)
    streams_per_key: int = Field(default=500, ge=1)
    stream_age: Annotated[float, Field(gt=0, le=3600)] = 900.0
    feed_retention: Seconds = 600.0

    drain_delay: Seconds | None = None
    drain_timeout: Seconds = 20.0
    pause_timeout: Seconds = 15.0
    grace_period: Seconds = 60.0

    log_format: Literal["auto", "json", "text"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    trace_url: str | None = None

    @classmethod
    def load(cls, **values: Any) -> Self:
        """Read the environment, `.env` and files. Raise `SettingsError` if a name is unknown or a value is wrong."""
        folder = secrets_folder(cls)
        refuse_unknown(cls, folder)
        given: dict[str, Any] = {} if folder is None else {"_secrets_dir": folder}
        try:
            settings = cls(**values, **given)
        except ValidationError as error:
            raise SettingsError(explain(error)) from None
        redaction.remember(settings.secrets())
        return settings

    def secrets(self) -> Iterator[str]:
        """Yield the values that no log or message may contain: the secrets, and the passwords in addresses."""
        for value in vars(self).values():
            for each in value if isinstance(value, tuple) else (value,):
                if isinstance(each, SecretStr):
                    yield from passwords(each.get_secret_value())

    @property
    def production(self) -> bool:
        return self.environment == "production"

    @property
    def embedded(self) -> bool:
        """Whether the instance uses the embedded PostgreSQL under `.flotilla/`, because no address is set."""
        return self.database_url is None

    @property
    def pooled(self) -> bool:
        """Whether the pool connects through a pooler, so that its sessions may not keep any state."""
        return self.database_direct_url is not None and self.database_direct_url != self.database_url

    @property
    def migrates_on_start(self) -> bool:
        return not self.production if self.migrate_on_start is None else self.migrate_on_start

    def address_of_trace(self, trace_id: str | None) -> str | None:
        """Return the address at which a browser finds this trace; None if there is none."""
        return self.trace_url.replace(TRACE_ID, trace_id) if self.trace_url and trace_id else None

    @property
    def logs_as_json(self) -> bool:
        return self.log_format == "json" or (self.log_format == "auto" and self.production)

    @property
    def drain_delay_seconds(self) -> float:
        """By default, in production as long as load balancers usually need to notice; in development, 1 s."""
        if self.drain_delay is not None:
            return self.drain_delay
        return 5.0 if self.production else 1.0

    @field_validator("namespace", "instance_name", "workspace")
    @classmethod
    def _check_name(cls, value: str | None) -> str | None:
        if value is not None and not NAME.fullmatch(value):
            raise ValueError(
                f"{value!r} is not a valid name: use a lower-case letter, then up to 62 lower-case letters, digits "
                f"and hyphens, such as 'api-2'"
            )
        return value

    @field_validator("namespace")
    @classmethod
    def _check_not_reserved(cls, value: str) -> str:
        if value.startswith("pg-") or value in {"pg", "information-schema"}:
            raise ValueError(f"{value!r} would become a schema name that PostgreSQL reserves; choose another one")
        return value

    @field_validator("version")
    @classmethod
    def _check_version(cls, value: str | None) -> str | None:
        if value is not None and not VERSION.fullmatch(value):
            raise ValueError("use 1 to 100 printable ASCII characters without spaces, such as '1.4.2' or 'c0ffee1'")
        return value

    @field_validator("trace_url")
    @classmethod
    def _check_trace_url(cls, value: str | None) -> str | None:
        if value is not None and (not WEB_ADDRESS.fullmatch(value) or TRACE_ID not in value):
            raise ValueError(
                f"use an address of http or https that contains {TRACE_ID}, such as "
                f"'https://grafana.example/trace/{TRACE_ID}'"
            )
        return value

    @field_validator("api_keys", "actions", "cors_origins", "trusted_proxies", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, value: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for number, key in enumerate(value, 1):
            if not KEY.fullmatch(key.get_secret_value()):
                raise ValueError(
                    f"key number {number} is not of the form NAME:SCOPE:SHA256, where SCOPE is read, operate or "
                    f"admin: `flotilla key NAME --scope read` makes a key and prints this line"
                )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if origin == "*" and len(value) > 1:
                raise ValueError("'*' means every origin: leave out the others, or '*'")
            if origin != "*" and (not ORIGIN.fullmatch(origin) or origin.endswith(USUAL_PORTS[origin[:5]])):
                raise ValueError(
                    f"{origin!r} is not the origin of a page as browsers send it: use the scheme and the host in "
                    f"lower case, and the port unless it is the usual one, such as 'https://app.example.com'"
                )
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _check_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for proxy in value:
            try:
                network = ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ValueError(f"{error}: use addresses and networks, such as '10.1.2.3' or '10.1.0.0/16'") from None
            if network.prefixlen == 0:
                raise ValueError(f"{proxy!r} is every address: any client could then choose the address it is seen by")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.pool_min > self.pool_max:
            raise ValueError(f"POOL_MIN ({self.pool_min}) is larger than POOL_MAX ({self.pool_max})")
        if self.embedded and self.database_direct_url is not None:
            raise ValueError("DATABASE_DIRECT_URL is set, but DATABASE_URL is not: set both, or only DATABASE_URL")
        if self.production and self.embedded:
            raise ValueError(
                "the embedded database is for development only, and ENVIRONMENT is 'production': set DATABASE_URL"
            )
        needed = self.drain_delay_seconds + self.drain_timeout + self.pause_timeout + STEPS_RESERVE + WATCHDOG_RESERVE
        if needed > self.grace_period:
            raise ValueError(
                f"GRACE_PERIOD is {self.grace_period:g} s, but an ordered shutdown may take {needed:g} s (DRAIN_DELAY "
                f"{self.drain_delay_seconds:g} + DRAIN_TIMEOUT {self.drain_timeout:g} + PAUSE_TIMEOUT "
                f"{self.pause_timeout:g} + {STEPS_RESERVE + WATCHDOG_RESERVE:g} for the other steps): the platform "
                f"would kill the process during it. Raise GRACE_PERIOD (and terminationGracePeriodSeconds), or lower "
                f"the others"
            )
        return self


def passwords(secret: str) -> Iterator[str]:
    """Yield the password in an address or in libpq's key=value form; for any other secret, the secret itself."""
    if "://" in secret:
        with suppress(ValueError):
            yield from filter(None, [urlsplit(secret).password])
    elif found := PASSWORD.search(secret):
        yield found[1] or found[2]
    else:
        yield secret


def known_names(settings: type[FleetSettings]) -> set[str]:
    """Return the environment variables that set a field."""
    return {PREFIX + field.upper() for field in settings.model_fields}


def from_env_file(settings: type[FleetSettings]) -> Mapping[str, str | None]:
    env_file = settings.model_config.get("env_file")
    return dotenv_values(str(env_file)) if env_file else {}


def secrets_folder(settings: type[FleetSettings]) -> Path | None:
    """Return the directory whose files are settings, each with the name of its variable."""
    name = f"{PREFIX}SECRETS_DIR"
    given = os.environ.get(name) or from_env_file(settings).get(name)
    if not given:
        return None
    folder = Path(given)
    if not folder.is_dir():
        raise SettingsError(f"{name}: there is no directory {given!r}")
    return folder


def refuse_unknown(settings: type[FleetSettings], folder: Path | None = None) -> None:
    """Refuse a `FLOTILLA_` name that no setting has, in the environment, in `.env` or in the directory."""
    known = known_names(settings)
    files = [each.name for each in folder.iterdir()] if folder is not None else ()
    for name in sorted({*os.environ, *from_env_file(settings), *files}):
        if not name.upper().startswith(PREFIX) or name.upper() in known:
            continue
        if re.fullmatch(r"FLOTILLA_(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_.*)", name):
            hint = (
                "Kubernetes adds such names for a Service called 'flotilla': set `enableServiceLinks: false` on the pod"
            )
        else:
            # FLOTILLA_ENV is more likely meant as FLOTILLA_ENVIRONMENT than as another name with similar letters.
            longer = sorted(each for each in known if each.startswith(name.upper()))
            close = longer if len(longer) == 1 else difflib.get_close_matches(name.upper(), known, n=1)
            hint = f"did you mean {close[0]}?" if close else "docs/reference/settings.md lists all settings"
        raise SettingsError(f"{name} is not a setting; {hint}")


def explain(error: ValidationError) -> str:
    """Turn pydantic's report into one line that names each environment variable."""
    lines = []
    for part in error.errors(include_url=False, include_input=False):
        where = str(part["loc"][0]).upper().removeprefix(PREFIX) if part["loc"] else ""
        text = part["msg"].removeprefix("Value error, ")
        lines.append(f"{PREFIX}{where}: {text}" if where else text)
    return "; ".join(lines)
