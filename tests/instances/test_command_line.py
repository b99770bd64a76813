"""The commands for instances, with `psql` of `docs/guides/develop.md`, and starts that must be refused with advice."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

from app import __version__
from app.fleet.db import embedded
from tests.support.fleet import Fleet, environment, run, run_module
from tests.support.pgbouncer import pgbouncer
from tests.support.postgres import Postgres, eventually, free_port

# -- up, list, down ---------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A working directory for the command line: the embedded database and the logs go there."""
    yield tmp_path
    run("down", cwd=tmp_path)
    embedded.stop(tmp_path / ".flotilla" / "postgresql")


@pytest.mark.long
def test_up_starts_three_instances_and_down_ends_them_and_their_database(folder: Path) -> None:
    port = free_port(3)
    up = run("up", "--port", str(port), cwd=folder)
    assert up.returncode == 0, up.stdout + up.stderr
    assert f"curl http://127.0.0.1:{port}/health/instances" in up.stdout
    for each in range(port, port + 3):
        view = httpx.get(f"http://127.0.0.1:{each}/health/instances").json()
        assert [row["state"] for row in view["instances"]] == ["ready"] * 3
        assert sum(row["leader"] for row in view["instances"]) == 1

    again = run("up", "--port", str(port), cwd=folder)
    assert again.returncode == 0
    assert again.stdout.count("is already running") == 3

    run("psql", "-c", "UPDATE instances SET version = '0.0.1'", cwd=folder)
    older = run("up", "--port", str(port), cwd=folder)
    assert older.stdout.count("is already running, with release 0.0.1; this checkout has") == 3

    listed = json.loads(run("list", "--json", cwd=folder).stdout)
    assert len(listed) == 3
    assert sum(row["leader"] for row in listed) == 1
    assert {row["port"] for row in listed} == {port, port + 1, port + 2}

    one = listed[0]["name"]
    down = run("down", one, cwd=folder)
    assert f"{one}: gone" in down.stdout
    assert one not in run("list", cwd=folder).stdout
    table = run("list", "--all", cwd=folder).stdout
    assert next(line for line in table.splitlines() if line.startswith(one)).split()[3] == "gone"

    more = run("up", "--port", str(port), cwd=folder)
    assert more.stdout.count("is already running") == 2, "only the missing instance is started"

    rest = run("down", cwd=folder)
    assert rest.returncode == 0
    assert "embedded PostgreSQL: stopped" in rest.stdout
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health/live")
    listed_later = run("list", cwd=folder)
    assert listed_later.returncode != 0
    assert "the embedded PostgreSQL is stopped: `flotilla up` starts it" in listed_later.stderr
    assert "no instance is running here" in run("down", cwd=folder).stdout


def test_a_closed_parent_directory_does_not_make_a_running_database_look_stopped(
    folder: Path,
) -> None:
    """Only as root: the user of the server must be able to enter the directory."""
    assert run("migrate", cwd=folder).returncode == 0
    folder.chmod(0o700)
    assert run("list", cwd=folder).returncode == 0


def test_up_names_its_instances_and_reports_a_port_in_use(folder: Path) -> None:
    port = free_port(3)
    up = run("up", "--instances", "2", "--name", "harbour", "--port", str(port), cwd=folder)
    assert up.returncode == 0, up.stdout + up.stderr
    names = {row["name"] for row in json.loads(run("list", "--json", cwd=folder).stdout)}
    assert names == {"harbour-1", "harbour-2"}

    with socket.create_server(("127.0.0.1", port + 2)):
        taken = run("up", "--instances", "1", "--port", str(port + 2), cwd=folder)
    assert taken.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port + 2}" in taken.stderr
    assert f"(pid {os.getpid()}: " in taken.stderr, "the process that listens there is this one"

    logs = run("logs", "--lines", "1000", cwd=folder).stdout
    assert logs.count('"event": "instance.ready"') == 2
    assert run("logs", str(port), "-n", "1", cwd=folder).stdout.count("\n") == 1
    assert "there is no log" in run("logs", "1", cwd=folder).stderr
    counted = run("psql", "-c", "SELECT 'living: ' || count(*) FROM instances WHERE state = 'ready'", cwd=folder)
    assert "living: 2" in counted.stdout, counted.stderr
    assert "--port" in taken.stderr

    collides = run("up", "--instances", "1", "--name", "harbour-1", "--port", str(free_port(3)), cwd=folder)
    assert collides.returncode == 3
    assert "a live instance is already named 'harbour-1'" in collides.stderr


def test_list_and_down_work_for_instances_started_in_any_way(fleet: Fleet) -> None:
    """The commands work through PostgreSQL alone: they know only the database."""
    instances = fleet.start(2, "uvicorn")
    listed = json.loads(run("list", "--json", address=fleet.address).stdout)
    assert {row["pid"] for row in listed} == {instance.pid for instance in instances}
    unknown = run("down", "nobody", address=fleet.address)
    assert unknown.returncode == 5
    assert "there is no live instance named 'nobody'" in unknown.stderr


def test_down_waits_for_a_frozen_instance_until_it_is_declared_gone(fleet: Fleet) -> None:
    instances = fleet.start(2)
    name = instances[0].me()["name"]
    drain_requested = "SELECT FROM flotilla.instances WHERE name = %s AND drain_requested_at IS NOT NULL"
    with (
        psycopg.connect(fleet.address, autocommit=True) as session,
        psycopg.connect(fleet.address) as row_holder,
        ThreadPoolExecutor() as pool,
    ):
        # While its row is locked, the leader cannot declare the instance gone before `down` has asked it to leave.
        row_holder.execute("SELECT FROM flotilla.instances WHERE name = %s FOR KEY SHARE", [name])
        instances[0].freeze()
        down_command = pool.submit(run, "down", name, address=fleet.address)
        eventually(lambda: session.execute(drain_requested, [name]).fetchone() is not None)
        row_holder.rollback()
        down = down_command.result()
    assert down.returncode == 0, down.stderr
    assert f"{name}: gone" in down.stdout


@pytest.mark.empty_database
def test_migrate_and_doctor_print_their_results(address: str) -> None:
    assert "migrated" in run("migrate", address=address).stdout
    assert "already up to date" in run("migrate", address=address).stdout
    examined = run("doctor", "--json", address=address)
    assert examined.returncode == 0
    assert {each["level"] for each in json.loads(examined.stdout)} == {"ok", "warning"}
    broken = run("doctor", address=f"postgresql://app@127.0.0.1:{free_port()}/app")
    assert broken.returncode == 1
    assert "problem" in broken.stdout


def test_version_prints_the_version_of_the_checkout() -> None:
    assert run("version").stdout.startswith(f"flotilla {__version__} (Python 3.")


def test_psql_says_when_it_is_not_installed(address: str) -> None:
    done = run("psql", address=address, env={"PATH": "/nowhere"})
    assert (done.returncode, "psql is not installed" in done.stderr) == (1, True)


def test_key_prints_a_valid_key_and_a_settings_line_without_that_key(fleet: Fleet) -> None:
    made = run("key", "ops", "--scope", "read").stdout.splitlines()
    key, line = made[1].strip(), made[3].strip()
    assert line.startswith("ops:read:")
    assert key not in line
    (instance,) = fleet.start(FLOTILLA_API_KEYS=line)
    assert instance.status("/health/instances") == 401
    assert httpx.get(f"{instance.url}/health/instances", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["up", "--port", "70000"], 2, "'--port'"),
        (["serve", "--port", "65536"], 2, "'--port'"),
        (["up", "--port", "65534"], 2, "choose a lower port"),
        (["up", "--instances", "0"], 2, "'--instances'"),
        (["key", "two words"], 2, "is not a valid name of a key"),
        (["key", "ops", "--scope", "root"], 2, "root"),
        (["up", "--workspace", "volume"], 1, "a workspace is exclusive"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_usage_is_answered_with_a_message_and_an_exit_code(
    address: str, arguments: list[str], code: int, message: str
) -> None:
    done = run(*arguments, address=address)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unusable_directory_for_the_embedded_database_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("migrate", cwd=tmp_path, env={"FLOTILLA_EMBEDDED_DIR": "file/below"})
    assert done.returncode == 4
    assert "FLOTILLA_EMBEDDED_DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_on_port_0_logs_the_chosen_port(fleet: Fleet) -> None:
    instance = fleet.launch(port=0)
    (line,) = eventually(lambda: instance.lines("instance.ready"))
    assert line["port"] > 0
    assert httpx.get(f"http://127.0.0.1:{line['port']}/health/live").status_code == 200


# -- starts that are refused ------------------------------------------------------------------------------------------


def refused_start(address: str | None, *messages: str, **env: str) -> None:
    """Start an instance in both ways; each must end by itself with these messages and without a traceback."""
    for module, *arguments in (("app", "serve"), ("uvicorn", "app.main:app")):
        done = run_module(module, *arguments, "--port", str(free_port()), env=environment(address, env))
        output = done.stdout + done.stderr
        assert done.returncode not in {0, None}, output
        for each in messages:
            assert each in output, output
        assert "Traceback" not in output
        assert "hunter2" not in output


def test_a_start_with_an_unreachable_database_is_refused() -> None:
    refused_start(f"postgresql://app:hunter2@127.0.0.1:{free_port()}/app", "cannot connect to PostgreSQL")


def test_a_start_with_pgbouncer_as_the_direct_address_is_refused(postgres: Postgres) -> None:
    with pgbouncer(postgres, more="ignore_startup_parameters = options") as port:
        refused_start(f"postgresql://postgres@127.0.0.1:{port}/postgres", "is a connection pooler")


def test_a_start_on_a_read_only_database_is_refused(own_postgres: Postgres) -> None:
    own_postgres.set("default_transaction_read_only", "on")
    refused_start(own_postgres.address_of(), "is read-only")


@pytest.mark.empty_database
def test_a_start_on_a_schema_of_another_application_is_refused(address: str, postgres: Postgres) -> None:
    with postgres.session(address.rpartition("/")[2]) as session:
        session.execute("CREATE SCHEMA flotilla CREATE TABLE customers (id int)")
    refused_start(address, "is not Flotilla's", "FLOTILLA_NAMESPACE")


@pytest.mark.empty_database
def test_a_start_with_missing_migrations_that_it_may_not_run_is_refused(address: str) -> None:
    refused_start(address, "run `flotilla migrate`", FLOTILLA_MIGRATE_ON_START="false", FLOTILLA_MIGRATE_WAIT="0")


def test_a_start_in_production_on_the_embedded_database_is_refused() -> None:
    refused_start(None, "set DATABASE_URL", FLOTILLA_ENVIRONMENT="production")


def test_a_start_in_production_without_api_keys_is_refused(address: str) -> None:
    refused_start(address, "API_KEYS is not set", FLOTILLA_ENVIRONMENT="production")


def test_a_start_with_an_unknown_setting_is_refused(address: str) -> None:
    refused_start(address, "did you mean FLOTILLA_DRAIN_DELAY?", FLOTILLA_DRAIN_DELAI="1")


def test_a_start_with_an_invalid_instance_name_is_refused(address: str) -> None:
    refused_start(address, "'No Name' is not a valid name", FLOTILLA_INSTANCE_NAME="No Name")


@pytest.mark.empty_database
def test_a_port_in_use_is_refused_before_the_instance_joins(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), address=address)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert run("list", address=address).returncode == 4, "nothing was migrated, and no instance joined"


def test_a_refused_start_leaves_no_row_and_no_session_behind(fleet: Fleet, postgres: Postgres) -> None:
    (holder,) = fleet.start(FLOTILLA_INSTANCE_NAME="harbour")
    late = fleet.launch(FLOTILLA_INSTANCE_NAME="harbour")
    assert late.wait_exit() == 3
    assert len(holder.instances()["instances"]) == 1
    with postgres.session() as session:
        name = fleet.address.rpartition("/")[2]
        find = """
            SELECT count(*) FROM pg_stat_activity
            WHERE datname = %s AND application_name LIKE 'flotilla%%' AND application_name NOT LIKE '%%/pool/%%'
        """
        # The three sessions of the holder: its link, its position in the queue, and the writing session of the leader.
        eventually(lambda: session.execute(find, [name]).fetchone() == (3,))
