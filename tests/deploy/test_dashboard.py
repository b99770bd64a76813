"""Every query of the Grafana dashboard returns series from a real Prometheus that scrapes real instances."""

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import yaml

from tests.deploy.declared import ROOT
from tests.support.fleet import NO_TRUST, Fleet
from tests.support.postgres import eventually, free_port
from tests.support.tools import program

DASHBOARD = json.loads((ROOT / "k8s/components/monitoring/dashboard.json").read_text())
PANELS: list[dict[str, Any]] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
MODULES = "tests.support.trial_actions,tests.support.trial_schedules"


@pytest.fixture
def fleet(address: str, tmp_path: Path) -> Iterator[Fleet]:
    with Fleet(address, tmp_path, FLOTILLA_ACTIONS=MODULES) as own:
        yield own


@pytest.fixture
def prometheus(fleet: Fleet, tmp_path: Path) -> Iterator[httpx.Client]:
    """Run a Prometheus that scrapes two instances, with the alerts."""
    targets = [each.url.removeprefix("http://") for each in fleet.start(2)]
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "k8s/components/monitoring/alerts.yml")],
        "scrape_configs": [{"job_name": "flotilla", "static_configs": [{"targets": targets}]}],
    }
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    port = free_port()
    command = [program("prometheus"), f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", verify=NO_TRUST, timeout=30) as client:
        yield client
    process.send_signal(signal.SIGTERM)
    process.wait()


def test_every_query_of_the_dashboard_returns_series(fleet: Fleet, prometheus: httpx.Client, address: str) -> None:
    instance = fleet.instances[0]
    for action in ("echo", "give-up", "note-under-lock"):
        instance.trigger(action)
    with psycopg.connect(address, autocommit=True) as session:
        session.execute("UPDATE flotilla.actions SET next_run_at = now() WHERE name = 'seldom'")
        session.execute("SELECT pg_notify('flotilla', 'slots:')")

    def empty() -> list[str]:
        return [query for query in QUERIES if not found(prometheus, query)]

    left = QUERIES
    try:
        eventually(lambda: not empty(), within=180, every=1.0)
    except AssertionError:
        left = empty()
        raise AssertionError(f"these queries return nothing: {left}") from None


def found(prometheus: httpx.Client, query: str) -> list[Any]:
    """Return what a query of the dashboard returns if Grafana's variables have their values."""
    query = query.replace("$job", ".*").replace("$__rate_interval", "30s")
    try:
        answer = prometheus.get("/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if answer.status_code == 503:  # it is still starting
        return []
    assert answer.status_code == 200, answer.text
    series: list[Any] = answer.json()["data"]["result"]
    return series


def test_every_panel_has_a_title_a_place_and_a_query_of_existing_metrics() -> None:
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert panel["targets"], panel["title"]
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_the_provisioned_data_source_and_the_rules_are_accepted(tmp_path: Path) -> None:
    done = subprocess.run(
        [program("promtool"), "check", "rules", str(ROOT / "k8s/components/monitoring/alerts.yml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    content = compose["configs"]["prometheus"]["content"].replace("${METRICS_API_KEY:-none}", "none")
    configuration = yaml.safe_load(content)
    configuration["rule_files"] = [str(ROOT / "k8s/components/monitoring/alerts.yml")]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump(configuration))
    done = subprocess.run(
        [program("promtool"), "check", "config", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
