"""The command line as a person uses it, and starts that must be refused with what to do."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psycopg
import pytest

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
def test_up_starts_three_that_know_each_other_and_down_ends_them_and_their_database(folder: Path) -> None:
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

    listed = json.loads(run("list", "--json", cwd=folder).stdout)
    assert len(listed) == 3
    assert sum(row["leader"] for row in listed) == 1
    assert {row["port"] for row in listed} == {port, port + 1, port + 2}

    one = listed[0]["name"]
    down = run("down", one, cwd=folder)
    assert f"{one}: gone" in down.stdout
    assert one not in run("list", cwd=folder).stdout
    table = run("list", "--all", cwd=folder).stdout
    assert next(line for line in table.splitlines() if line.startswith(one)).split()[2] == "gone"

    more = run("up", "--port", str(port), cwd=folder)
    assert more.stdout.count("is already running") == 2, "only the one that is missing is started"

    rest = run("down", cwd=folder)
    assert rest.returncode == 0
    assert "embedded PostgreSQL: stopped" in rest.stdout
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health/live")
    assert "no instance is running here" in run("down", cwd=folder).stdout


def test_a_directory_above_that_was_closed_meanwhile_does_not_make_a_running_database_look_stopped(
    folder: Path,
) -> None:
    """As root only: the server's own user must get through."""
    assert run("migrate", cwd=folder).returncode == 0
    folder.chmod(0o700)
    assert run("list", cwd=folder).returncode == 0


def test_up_names_its_instances_and_says_which_port_is_taken(folder: Path) -> None:
    port = free_port(3)
    up = run("up", "--instances", "2", "--name", "harbour", "--port", str(port), cwd=folder)
    assert up.returncode == 0, up.stdout + up.stderr
    names = {row["name"] for row in json.loads(run("list", "--json", cwd=folder).stdout)}
    assert names == {"harbour-1", "harbour-2"}

    with socket.create_server(("127.0.0.1", port + 2)):
        taken = run("up", "--instances", "1", "--port", str(port + 2), cwd=folder)
    assert taken.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port + 2}" in taken.stderr
    assert "--port" in taken.stderr

    collides = run("up", "--instances", "1", "--name", "harbour-1", "--port", str(free_port(3)), cwd=folder)
    assert collides.returncode == 3
    assert "a live instance is already named 'harbour-1'" in collides.stderr


def test_list_and_down_speak_of_instances_started_anywhere(fleet: Fleet) -> None:
    """Through PostgreSQL alone: the command knows the database and nothing else."""
    instances = fleet.start(2, "uvicorn")
    listed = json.loads(run("list", "--json", address=fleet.address).stdout)
    assert {row["pid"] for row in listed} == {instance.pid for instance in instances}
    unknown = run("down", "nobody", address=fleet.address)
    assert unknown.returncode == 5
    assert "there is no live instance named 'nobody'" in unknown.stderr


def test_down_waits_for_a_frozen_instance_until_it_is_declared_gone(fleet: Fleet) -> None:
    instances = fleet.start(2)
    name = instances[0].me()["name"]
    asked = "SELECT FROM flotilla.instances WHERE name = %s AND drain_requested_at IS NOT NULL"
    with (
        psycopg.connect(fleet.address, autocommit=True) as session,
        psycopg.connect(fleet.address) as verdict,
        ThreadPoolExecutor() as pool,
    ):
        # While somebody has its row locked, nobody declares it gone: not before it was asked to leave.
        verdict.execute("SELECT FROM flotilla.instances WHERE name = %s FOR KEY SHARE", [name])
        instances[0].freeze()
        asking = pool.submit(run, "down", name, address=fleet.address)
        eventually(lambda: session.execute(asked, [name]).fetchone() is not None)
        verdict.rollback()
        down = asking.result()
    assert down.returncode == 0, down.stderr
    assert f"{name}: gone" in down.stdout


@pytest.mark.empty_database
def test_migrate_and_doctor_say_what_they_found(address: str) -> None:
    assert "migrated" in run("migrate", address=address).stdout
    assert "already up to date" in run("migrate", address=address).stdout
    examined = run("doctor", "--json", address=address)
    assert examined.returncode == 0
    assert {each["level"] for each in json.loads(examined.stdout)} == {"ok", "warning"}
    broken = run("doctor", address=f"postgresql://app@127.0.0.1:{free_port()}/app")
    assert broken.returncode == 1
    assert "problem" in broken.stdout


def test_key_makes_a_key_that_opens_and_a_line_that_does_not_show_it(fleet: Fleet) -> None:
    made = run("key", "ops", "--scope", "read").stdout.splitlines()
    key, line = made[1].strip(), made[3].strip()
    assert line.startswith("ops:read:")
    assert key not in line
    (instance,) = fleet.start(FLOTILLA_API_KEYS=line)
    assert instance.status("/health/instances") == 401
    assert httpx.get(f"{instance.url}/health/instances", headers={"authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
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
def test_wrong_usage_is_answered_with_a_sentence(address: str, arguments: list[str], code: int, said: str) -> None:
    done = run(*arguments, address=address)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_directory_that_cannot_be_used_for_the_embedded_database_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = run("list", cwd=tmp_path, env={"FLOTILLA_EMBEDDED_DIR": "file/below"})
    assert done.returncode == 4
    assert "FLOTILLA_EMBEDDED_DIR" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_on_any_port_tells_which(fleet: Fleet) -> None:
    instance = fleet.launch(port=0)
    (line,) = eventually(lambda: instance.lines("instance.ready"))
    assert line["port"] > 0
    assert httpx.get(f"http://127.0.0.1:{line['port']}/health/live").status_code == 200


# -- starts that are refused ------------------------------------------------------------------------------------------


def refused_start(address: str | None, *said: str, **env: str) -> None:
    """Start an instance both ways; each must end by itself, saying this and nothing like a traceback."""
    for module, *arguments in (("app", "serve"), ("uvicorn", "app.main:app")):
        done = run_module(module, *arguments, "--port", str(free_port()), env=environment(address, env))
        output = done.stdout + done.stderr
        assert done.returncode not in {0, None}, output
        for each in said:
            assert each in output, output
        assert "Traceback" not in output
        assert "hunter2" not in output


def test_an_unreachable_database() -> None:
    refused_start(f"postgresql://app:hunter2@127.0.0.1:{free_port()}/app", "cannot connect to PostgreSQL")


def test_pgbouncer_in_transaction_mode_as_the_direct_address(postgres: Postgres) -> None:
    with pgbouncer(postgres, more="ignore_startup_parameters = options") as port:
        refused_start(f"postgresql://postgres@127.0.0.1:{port}/postgres", "is a connection pooler")


def test_a_read_only_database(own_postgres: Postgres) -> None:
    own_postgres.set("default_transaction_read_only", "on")
    refused_start(own_postgres.address_of(), "is read-only")


@pytest.mark.empty_database
def test_somebody_elses_schema(address: str, postgres: Postgres) -> None:
    with postgres.session(address.rpartition("/")[2]) as session:
        session.execute("CREATE SCHEMA flotilla CREATE TABLE customers (id int)")
    refused_start(address, "is not Flotilla's", "FLOTILLA_NAMESPACE")


@pytest.mark.empty_database
def test_missing_migrations_that_it_may_not_run(address: str) -> None:
    refused_start(address, "run `flotilla migrate`", FLOTILLA_MIGRATE_ON_START="false", FLOTILLA_MIGRATE_WAIT="0")


def test_production_on_the_embedded_database() -> None:
    refused_start(None, "set DATABASE_URL", FLOTILLA_ENVIRONMENT="production")


def test_production_without_keys(address: str) -> None:
    refused_start(address, "API_KEYS is not set", FLOTILLA_ENVIRONMENT="production")


def test_an_unknown_setting(address: str) -> None:
    refused_start(address, "did you mean FLOTILLA_DRAIN_DELAY?", FLOTILLA_DRAIN_DELAI="1")


def test_an_invalid_name(address: str) -> None:
    refused_start(address, "'No Name' is not a valid name", FLOTILLA_INSTANCE_NAME="No Name")


@pytest.mark.empty_database
def test_a_taken_port_is_refused_before_the_instance_joins(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), address=address)
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert run("list", address=address).returncode == 4, "nothing was migrated, and nobody joined"


def test_a_refused_start_leaves_nothing_behind(fleet: Fleet, postgres: Postgres) -> None:
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
        # The holder's link, its place in the queue, and what it writes by as the leader. Nothing of the other's.
        eventually(lambda: session.execute(find, [name]).fetchone() == (3,))
