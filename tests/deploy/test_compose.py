"""docker-compose.yml starts in a new clone without preparation, and stops without losing a request."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import yaml

from app.fleet.role import Role
from tests.deploy.declared import API_KEYS, ROOT, last, settings_under
from tests.support.postgres import Postgres
from tests.support.tools import program

INSTANCES = ["instance-1", "instance-2", "instance-3"]
WORKERS = ["worker-1", "worker-2"]
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\}")

Service = dict[str, Any]


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Service]:
    found: dict[str, Service] = compose["services"]
    return found


@pytest.fixture(scope="module")
def haproxy(compose: dict[str, Any]) -> str:
    return str(compose["configs"]["haproxy"]["content"])


def environment(service: Service, **given: str) -> dict[str, str]:
    """Return the environment of a container if only these variables are set where `docker compose up` is called."""
    return {name: filled(str(value), given) for name, value in service["environment"].items()}


def filled(text: str, given: Mapping[str, str]) -> str:
    def value(found: re.Match[str]) -> str:
        default = found["default"]
        assert default is not None, f"{found[0]} has no default, so `docker compose up` would not start"
        return given.get(found["name"]) or default

    return VARIABLE.sub(value, text)


def seconds(duration: str) -> float:
    assert duration.endswith("s")
    return float(duration[:-1])


def of_checks(haproxy: str, name: str) -> str:
    found = re.search(rf"^\s*default-server check .*\b{name} (\S+)", haproxy, re.MULTILINE)
    assert found is not None
    return found[1]


def test_three_instances_and_two_workers_run_the_image_that_the_migration_builds(services: dict[str, Service]) -> None:
    migration = services["migrate"]
    running = [name for name, each in services.items() if each["image"] == migration["image"] and name != "migrate"]
    assert running == [*INSTANCES, *WORKERS]
    assert migration["build"] == "."
    # An image that is built locally cannot be pulled.
    assert {services[name]["pull_policy"] for name in (*running, "migrate")} == {"never"}


def test_workers_start_only_with_their_profile_and_execute_runs(services: dict[str, Service]) -> None:
    profiles = {name: each["profiles"] for name, each in services.items() if "profiles" in each}
    assert profiles == {
        "worker-1": ["workers"],
        "worker-2": ["workers"],
        "prometheus": ["monitoring"],
        "grafana": ["monitoring"],
    }
    assert {settings_under(environment(services[name])).role for name in WORKERS} == {Role.WORKER}
    given = environment(services["instance-1"], FLOTILLA_ROLE="web")
    assert settings_under(given).role is Role.WEB
    assert settings_under(environment(services["instance-1"])).role is Role.ALL


@pytest.mark.parametrize("name", [*INSTANCES, *WORKERS, "migrate"])
def test_a_container_starts_without_any_preparation(services: dict[str, Service], name: str) -> None:
    settings = settings_under(environment(services[name]))
    assert settings.environment == "development"
    assert not settings.embedded


@pytest.mark.parametrize("name", [*INSTANCES, *WORKERS, "migrate"])
def test_containers_read_compose_env_and_not_the_env_file_of_make_up(services: dict[str, Service], name: str) -> None:
    assert services[name]["env_file"] == [{"path": "compose.env", "required": False}]
    assert "compose.env" in (ROOT / ".gitignore").read_text().split()


@pytest.mark.parametrize("name", [*INSTANCES, *WORKERS, "migrate"])
def test_a_container_starts_in_production_with_api_keys(services: dict[str, Service], name: str) -> None:
    given = {"FLOTILLA_ENVIRONMENT": "production", "FLOTILLA_API_KEYS": API_KEYS, "DATABASE_PASSWORD": "secret"}
    settings = settings_under(environment(services[name], **given))
    assert settings.production
    assert settings.database_url is not None
    assert ":secret@postgres" in settings.database_url.get_secret_value()
    assert filled(services["postgres"]["environment"]["DATABASE_PASSWORD"], given) == "secret"


def test_each_instance_has_its_own_name(services: dict[str, Service]) -> None:
    names = [*INSTANCES, *WORKERS]
    assert [settings_under(environment(services[name])).instance_name for name in names] == names


def test_instances_start_after_the_migration_and_the_migration_after_the_database(services: dict[str, Service]) -> None:
    assert services["migrate"]["command"] == ["flotilla", "migrate"]
    assert services["migrate"]["depends_on"] == {"postgres": {"condition": "service_healthy"}}
    for name in (*INSTANCES, *WORKERS):
        assert services[name]["depends_on"] == {"migrate": {"condition": "service_completed_successfully"}}
        assert not settings_under(environment(services[name])).migrates_on_start


def test_docker_waits_as_long_as_the_ordered_shutdown_may_take(services: dict[str, Service]) -> None:
    for name in (*INSTANCES, *WORKERS):
        grace = settings_under(environment(services[name])).grace_period
        assert seconds(services[name]["stop_grace_period"]) >= grace


def test_haproxy_checks_the_readiness_of_every_instance(haproxy: str) -> None:
    assert "option httpchk GET /health/ready" in haproxy
    assert "http-check expect status 200" in haproxy
    port = last("EXPOSE")
    assert re.findall(r"^\s*server (\S+) (\S+)$", haproxy, re.MULTILINE) == [
        (each, f"{each}:{port}") for each in INSTANCES
    ]


def test_haproxy_notices_a_drain_while_the_listener_is_still_open(haproxy: str, services: dict[str, Service]) -> None:
    noticed = seconds(of_checks(haproxy, "inter")) * int(of_checks(haproxy, "fall"))
    for name in INSTANCES:
        assert noticed <= settings_under(environment(services[name])).drain_delay_seconds


def test_haproxy_accepts_its_configuration(haproxy: str, tmp_path: Path) -> None:
    found = program("haproxy")
    configuration = tmp_path / "haproxy.cfg"
    configuration.write_text(haproxy)
    done = subprocess.run([found, "-c", "-f", str(configuration)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "[WARNING]" not in done.stderr


def test_the_health_of_a_container_is_the_readiness_of_its_instance(services: dict[str, Service]) -> None:
    for name in (*INSTANCES, *WORKERS):
        command = services[name]["healthcheck"]["test"]
        assert command[:3] == ["CMD", "python", "-c"]
        assert f"http://127.0.0.1:{last('EXPOSE')}/health/ready" in command[3]
        compile(command[3], "healthcheck", "exec")


def test_the_instances_own_their_database_and_are_no_superuser(compose: dict[str, Any], own_postgres: Postgres) -> None:
    """Execute the script that PostgreSQL's image executes in a new volume, with the same program on another server."""
    script = compose["configs"]["database"]["content"].replace("$$", "$")
    (mounted,) = compose["services"]["postgres"]["configs"]
    assert mounted["source"] == "database"
    assert mounted["target"].startswith("/docker-entrypoint-initdb.d/")
    env = {
        "PGHOST": "127.0.0.1",
        "PGPORT": str(own_postgres.port),
        "DATABASE_PASSWORD": "it's secret",
        "PATH": f"{own_postgres.binaries}:{os.environ['PATH']}",
    }
    done = subprocess.run(["sh", "-c", script], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(own_postgres.address_of("flotilla", user="flotilla"), autocommit=True) as session:
        row = session.execute("SELECT rolsuper, rolcreaterole FROM pg_roles WHERE rolname = current_user").fetchone()
        assert row == (False, False)
        session.execute("CREATE SCHEMA flotilla")


def test_ports_are_published_only_on_this_machine_and_no_port_of_an_instance(services: dict[str, Service]) -> None:
    published = {
        name: [filled(port, {}) for port in each["ports"]] for name, each in services.items() if "ports" in each
    }
    assert published == {
        "proxy": ["127.0.0.1:8080:8080"],
        "prometheus": ["127.0.0.1:9090:9090"],
        "grafana": ["127.0.0.1:3000:3000"],
    }


def test_the_data_of_postgresql_survives_its_container(compose: dict[str, Any], services: dict[str, Service]) -> None:
    # The data directory of the image from version 18 on; a volume at the former path would stay empty.
    assert services["postgres"]["volumes"] == ["postgres:/var/lib/postgresql"]
    assert services["postgres"]["image"] == "postgres:18"
    assert "postgres" in compose["volumes"]


def test_every_image_has_a_fixed_tag(services: dict[str, Service]) -> None:
    for each in services.values():
        assert each["image"].partition(":")[2] not in {"", "latest"}
