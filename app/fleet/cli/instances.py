"""Commands about instances: start them on this machine, list all of them, stop any of them."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, TextIO
from urllib.request import urlopen

import typer

from app import __version__
from app.fleet.cli.terminal import (
    AsJson,
    coarse_duration,
    command_name,
    load_settings,
    session_for,
    write,
    write_json,
    write_table,
)
from app.fleet.cluster.registry import Instance, Registry, Session
from app.fleet.coordination.locks.admin import read_lock_names
from app.fleet.db import dsn, embedded, migrations, preflight
from app.fleet.db.namespace import Namespace
from app.fleet.errors import FleetError, SettingsError, StartRefused
from app.fleet.role import Role
from app.fleet.server.port_owner import port_owner
from app.fleet.settings import FleetSettings
from app.fleet.telemetry import logs

READY_WITHIN = 60.0
LEADER_WITHIN = 5.0
FOLLOW_INTERVAL = 0.25
COLUMNS = (
    "NAME", "ID", "ROLE", "STATE", "LEADER", "RUNNING", "HOST", "PID", "PORT", "VERSION", "HEARTBEAT", "UP",
    "WORKSPACE",
)  # fmt: skip

Workspace = Annotated[str | None, typer.Option(help="Workspace, exclusive among living instances.")]
WithRole = Annotated[
    Role | None, typer.Option(help="web serves and executes no runs, worker only executes runs, all does both.")
]
Force = Annotated[bool, typer.Option("--force", help="Share the workspace even if it is in use.")]


# -- starting ---------------------------------------------------------------------------------------------------------


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 lets the system choose.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of this instance.")] = None,
    role: WithRole = None,
    workspace: Workspace = None,
    force: Force = False,
) -> None:
    """Run one instance in the foreground, for example in a container."""
    given = {
        "HOST": host,
        "PORT": port,
        "INSTANCE_NAME": name,
        "ROLE": role and role.value,
        "WORKSPACE": workspace,
    }
    if force:
        given["WORKSPACE_FORCE"] = "true"
    # Passed in the environment, because the service reads its settings itself, as it does under every server.
    os.environ.update({f"FLOTILLA_{key}": str(value) for key, value in given.items() if value is not None})
    settings = load_settings()
    listener = listen(settings)

    import uvicorn

    logs.set_up(as_json=settings.logs_as_json, level=settings.log_level, namespace=settings.namespace)
    config = uvicorn.Config(
        "app.main:app",
        host=settings.host,
        port=listener.getsockname()[1],
        log_config=None,
        server_header=False,
    )
    server = uvicorn.Server(config)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def up(
    instances: Annotated[int, typer.Option("--instances", "-n", min=1, max=100, help="Number of instances.")] = 3,
    name: Annotated[str | None, typer.Option(help="Name of the instance; several get NAME-1, NAME-2, …")] = None,
    role: WithRole = None,
    workspace: Workspace = None,
    force: Force = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the first instance; the others get the next ports.")
    ] = None,
) -> None:
    """Start instances on this machine, in the background, and wait until they are ready."""
    settings = load_settings()
    began = time.monotonic()
    if workspace and instances > 1 and not force:
        raise FleetError("a workspace is exclusive: start only one instance with it, or share it with --force")
    addresses = dsn.resolve(settings)
    preflight.check_direct(addresses)
    namespace = Namespace(settings.namespace)
    migrations.ensure_current(
        addresses.direct, namespace, allowed=settings.migrates_on_start, wait=settings.migrate_wait
    )
    first = settings.port if port is None else port
    if not 0 < first <= 65536 - instances:
        raise SettingsError(f"there are no {instances} ports from {first} on: choose a lower port with --port")
    ports = range(first, first + instances)
    with session_for(settings) as (session, registry):
        present = by_port_on_this_host(registry.list(session))
    started: dict[int, subprocess.Popen[bytes]] = {}
    for number, each in enumerate(ports, 1):
        if each in present:
            write(f"port {each}: {present[each].name} is already running{of_another_release(present[each])}")
            continue
        own_name = name if name is None or instances == 1 else f"{name}-{number}"
        started[each] = launch(each, settings, own_name, role, workspace, force)
    for each, process in started.items():
        wait_until_ready(each, process, settings)
    wait_for_leader(settings)
    show(settings)
    write(f"\n{len(ports)} instances up in {time.monotonic() - began:.1f} s. Next:")
    write(f"  open http://{reachable(settings.host)}:{first}/dashboard")
    write(f"  curl http://{reachable(settings.host)}:{first}/health/instances")
    me = command_name()
    write(f"  {me} logs -f · {me} list · {me} down NAME · {me} down")


def launch(
    port: int, settings: FleetSettings, name: str | None, role: Role | None, workspace: str | None, force: bool
) -> "subprocess.Popen[bytes]":
    """Start an instance that continues to run after this command has ended."""
    refuse_taken_port(settings.host, port)
    command = [sys.executable, "-m", "app", "serve", "--port", str(port)]
    for flag, value in (("--name", name), ("--role", role and role.value), ("--workspace", workspace)):
        if value is not None:
            command += [flag, value]
    if force:
        command.append("--force")
    log = Path(log_file(str(port)))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as target:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=target, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_until_ready(port: int, process: "subprocess.Popen[bytes]", settings: FleetSettings) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while time.monotonic() < deadline:
        if process.poll() is not None:
            tail = "\n".join(Path(log_file(str(port))).read_text(errors="replace").splitlines()[-5:])
            raise StartRefused(f"the instance on port {port} exited with {process.returncode}:\n{tail}")
        with contextlib.suppress(OSError):
            if urlopen(f"http://{reachable(settings.host)}:{port}/health/ready", timeout=2).status == 200:
                return
        time.sleep(0.05)
    raise FleetError(
        f"the instance on port {port} was not ready within {READY_WITHIN:.0f} s: see {log_file(str(port))}"
    )


def wait_for_leader(settings: FleetSettings) -> None:
    """Wait until an instance is the leader, usually some milliseconds. Without a leader in time, the list shows it."""
    deadline = time.monotonic() + LEADER_WITHIN
    with session_for(settings) as (session, registry):
        while not any(row.leader for row in registry.list(session)) and time.monotonic() < deadline:
            time.sleep(0.02)


# -- listing and stopping ---------------------------------------------------------------------------------------------


def list_command(
    with_gone: Annotated[
        bool, typer.Option("--all", help="Also list the instances that ended within the last 10 minutes.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List all living instances of the namespace, on all machines."""
    show(load_settings(), with_gone=with_gone, as_json=as_json)


def down(
    name: Annotated[str | None, typer.Argument(help="Name of the instance (default: all on this machine).")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait until it is gone.")] = 70.0,
) -> None:
    """Drain and stop an instance on any machine; without a name, stop all on this machine and the embedded database."""
    settings = load_settings()
    if settings.embedded and not embedded.is_running(settings.embedded_dir):
        write("no instance is running here: the embedded PostgreSQL is stopped")
        return
    with session_for(settings) as (session, registry):
        if name is not None:
            names = [name]
        else:
            names = [
                each.name for each in registry.list(session) if each.live and each.hostname == socket.gethostname()
            ]
        reason = f"flotilla down, by pid {os.getpid()} on {socket.gethostname()}"
        waiting = {each: registry.request_drain(session, each, reason) for each in names}
        wait_until_gone(session, registry, waiting, timeout)
        last_one_gone = not any(each.live for each in registry.list(session))
    if name is None and settings.embedded and last_one_gone and embedded.stop(settings.embedded_dir):
        write("embedded PostgreSQL: stopped")


def wait_until_gone(session: Session, registry: Registry, waiting: dict[str, int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for name, identifier in list(waiting.items()):
            if registry.is_gone(session, identifier):
                write(f"{name}: gone")
                del waiting[name]
        time.sleep(0.1)
    if waiting:
        raise FleetError(f"not gone after {timeout:.0f} s: {', '.join(waiting)}; `flotilla list` shows their state")


def logs_command(
    port: Annotated[int | None, typer.Argument(help="Port of an instance (default: all of this machine).")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines of each log to begin with.")] = 20,
) -> None:
    """Show the logs of the instances that `flotilla up` has started in this folder."""
    paths = sorted(Path().glob(log_file("*" if port is None else str(port))))
    if not paths:
        raise FleetError(f"there is no log at {log_file('*' if port is None else str(port))}: start with `flotilla up`")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(path.open(errors="replace")) for path in paths]
        for each in files:
            sys.stdout.writelines(deque(each, maxlen=lines))
        while follow:
            new = [line for each in files for line in new_lines(each)]
            sys.stdout.writelines(new)
            sys.stdout.flush()
            if not new:
                time.sleep(FOLLOW_INTERVAL)


def new_lines(file: TextIO) -> list[str]:
    """Return what was added since the last read. A start begins the file anew."""
    if os.fstat(file.fileno()).st_size < file.tell():
        file.seek(0)
    return file.readlines()


def show(settings: FleetSettings, *, with_gone: bool = False, as_json: bool = False) -> None:
    with session_for(settings) as (session, registry):
        rows = [row for row in registry.list(session) if with_gone or row.live]
        if as_json:
            locks = read_lock_names(session, registry.namespace)
            write_json([asdict(row) | {"locks": locks.get(row.id, [])} for row in rows])
        else:
            write_table(COLUMNS, map(cells, rows))


def cells(row: Instance) -> Iterator[str]:
    yield from (row.name, str(row.id), row.role, row.state, "leader" if row.leader else "", str(row.running))
    yield from (row.hostname, str(row.pid), str(row.port or ""), row.version)
    if row.live:
        yield f"{row.heartbeat_age_ms} ms ago"
        yield coarse_duration(row.started_at, datetime.now(row.started_at.tzinfo))
    else:
        yield row.gone_reason or ""
        yield coarse_duration(row.started_at, row.gone_at or row.started_at)
    yield row.workspace or ""


# -- helpers ----------------------------------------------------------------------------------------------------------


def of_another_release(instance: Instance) -> str:
    """Return what to do about an instance that has the code of another release, as after an update."""
    if instance.version == __version__:
        return ""
    return f", with release {instance.version}; this checkout has {__version__}: `flotilla down` first"


def by_port_on_this_host(rows: list[Instance]) -> dict[int, Instance]:
    """Return the living instances of this machine by their port."""
    return {row.port: row for row in rows if row.live and row.port and row.hostname == socket.gethostname()}


def listen(settings: FleetSettings) -> socket.socket:
    """Bind the port before anything else: an instance that cannot be reached must not join."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise port_taken(settings.host, settings.port, error) from error
    return listener


def refuse_taken_port(host: str, port: int) -> None:
    with contextlib.closing(socket.socket()) as probe:
        probe.settimeout(1)
        if probe.connect_ex((reachable(host), port)) == 0:
            raise port_taken(host, port, OSError("another process listens there"))


def port_taken(host: str, port: int, error: OSError) -> FleetError:
    owner = port_owner(port)
    by = f" ({owner})" if owner else ""
    return FleetError(
        f"cannot listen on {host}:{port}: {error.strerror or error}{by}. Choose another port with --port or "
        f"FLOTILLA_PORT, or stop the process that uses it (`flotilla list` shows the instances)"
    )


def reachable(host: str) -> str:
    return "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104 — a comparison, nothing is bound


def log_file(which: str) -> str:
    return f".flotilla/logs/{which}.log"
