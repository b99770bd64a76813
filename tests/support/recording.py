"""Recordings of metrics: what instances returned at `GET /metrics`, as the input of `promtool test rules`."""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.fleet import InstanceProcess
from tests.support.tools import program

# Of each scrape, what the alerts read.
PREFIXES = ("flotilla_cluster_", "flotilla_runs_", "flotilla_link_up", "flotilla_pool_refused_total")

Scrape = Mapping[str, float]


def scrape(instance: InstanceProcess) -> dict[str, float]:
    """Return the samples of an instance by their name and labels, as Prometheus stores them."""
    answer = instance.client.get("/metrics")
    assert answer.status_code == 200, answer.text
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            if sample.name.startswith(PREFIXES):
                labels = {**sample.labels, "job": "flotilla", "instance": instance.url.removeprefix("http://")}
                pairs = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
                found[f"{sample.name}{{{pairs}}}"] = sample.value
    return found


@dataclass
class Recording:
    """Scrapes of several instances, one after the other at a fixed interval."""

    interval: str = "15s"
    steps: list[dict[str, float]] = field(default_factory=list)

    def add(self, instances: Sequence[InstanceProcess], times: int = 1) -> None:
        """Add a scrape of these instances; with `times`, as if nothing changed for so many intervals."""
        found: dict[str, float] = {}
        for instance in instances:
            try:
                found |= scrape(instance)
            except httpx.TransportError:
                continue
        self.steps += [found] * times

    def series(self) -> Iterator[dict[str, str]]:
        for name in sorted({name for step in self.steps for name in step}):
            values = (f"{step[name]:.3f}" if name in step else "_" for step in self.steps)
            yield {"series": name, "values": " ".join(values)}


def differences(recording: Recording, rules: Path, folder: Path, expected: Mapping[str, Mapping[str, float]]) -> str:
    """Have promtool evaluate the rules: at each instant, these alerts fire, each for so many label sets.

    Return what it says about other or missing alerts.
    """
    test: dict[str, Any] = {
        "rule_files": [str(rules)],
        "evaluation_interval": recording.interval,
        "tests": [
            {
                "interval": recording.interval,
                "input_series": list(recording.series()),
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": instant,
                        "exp_samples": [
                            {"labels": f'{{alertname="{alert}"}}', "value": count} for alert, count in alerts.items()
                        ],
                    }
                    for instant, alerts in expected.items()
                ],
            }
        ],
    }
    file = folder / "alerts_test.yml"
    # JSON is YAML too, and is written a hundred times as fast.
    file.write_text(json.dumps(test))
    done = subprocess.run(
        [program("promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr
