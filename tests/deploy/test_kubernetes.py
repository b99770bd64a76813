"""Every overlay, rendered by kubectl, agrees with the settings of the service that runs in it.

The numbers of a deployment are in the manifests and in the settings, and must agree. These tests read both.
"""

import base64
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from app.settings import Settings
from tests.deploy.declared import ADDRESS, API_KEYS, ROOT, settings_under
from tests.support.tools import program

NEWEST = kubernetes_validate.latest_version()
OVERLAYS = sorted(each.name for each in (ROOT / "k8s/overlays").iterdir())
# The secrets that the guide asks the operator to create.
SECRETS: dict[str, dict[str, str]] = {
    "flotilla": {"DATABASE_URL": ADDRESS, "FLOTILLA_API_KEYS": API_KEYS},
    "flotilla-migration": {"DATABASE_URL": ADDRESS},
}
PROBES = ("startup", "readiness", "liveness")
# The requirements of the level "restricted" of Pod Security, and a read-only file system.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Seconds that a start may take besides waiting for the migration: the first connections of the pool, and joining.
STARTING = 10

# A name that a Deployment would give to a pod.
FIELDS = {"metadata.name": "flotilla-7c6d8f9b5-x2x4z"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """An overlay as the API server would receive it."""

    overlay: str
    objects: list[Object]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.objects if each["kind"] == kind and each["metadata"]["name"] == name)
        return found

    @cached_property
    def deployment(self) -> Object:
        return self.one("Deployment", "flotilla")

    @cached_property
    def job(self) -> Object:
        return self.one("Job", "flotilla-migrate")

    @property
    def pod(self) -> Object:
        spec: Object = template(self.deployment)["spec"]
        return spec

    @property
    def container(self) -> Object:
        only: Object
        (only,) = self.pod["containers"]
        return only

    @cached_property
    def settings(self) -> Settings:
        return settings_under(self.environment(self.container))

    def probe(self, name: str) -> Object:
        found: Object = self.container[f"{name}Probe"]
        return found

    def templates(self) -> Iterator[Object]:
        for each in self.objects:
            if "template" in each.get("spec", {}):
                yield template(each)

    def environment(self, container: Object) -> dict[str, str]:
        """Return the environment that the kubelet would build: of equal names, the last one applies."""
        found: dict[str, str] = {}
        for source in container["envFrom"]:
            if "configMapRef" in source:
                found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
            else:
                found |= self.secret(source["secretRef"]["name"])
        for each in container.get("env", []):
            found[each["name"]] = (
                each["value"] if "value" in each else FIELDS[each["valueFrom"]["fieldRef"]["fieldPath"]]
            )
        return found

    def secret(self, name: str) -> Mapping[str, str]:
        for each in self.objects:
            if each["kind"] == "Secret" and each["metadata"]["name"] == name:
                return {key: base64.b64decode(value).decode() for key, value in each["data"].items()}
        return SECRETS[name]


def template(workload: Object) -> Object:
    inner: Object = workload["spec"]["template"]
    return inner


def failing_time(probe: Object) -> int:
    """Return for how many seconds a probe must fail until Kubernetes acts."""
    return int(probe["periodSeconds"]) * int(probe["failureThreshold"])


def selects(selector: Mapping[str, str], pod: Object) -> bool:
    labels: Mapping[str, str] = pod["metadata"]["labels"]
    return selector.items() <= labels.items()


@pytest.fixture(scope="module", params=OVERLAYS)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    kubectl = program("kubectl")
    path = ROOT / "k8s/overlays" / request.param
    done = subprocess.run([kubectl, "kustomize", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Rendered(request.param, list(yaml.safe_load_all(done.stdout)))


def test_there_is_an_overlay_for_development_and_one_for_production() -> None:
    assert OVERLAYS == ["development", "production"]


def test_every_object_is_valid_for_kubernetes(rendered: Rendered) -> None:
    for each in rendered.objects:
        kubernetes_validate.validate(each, NEWEST, strict=True)


def test_the_service_accepts_the_environment_of_its_pod(rendered: Rendered) -> None:
    assert rendered.settings.environment == rendered.overlay
    assert rendered.settings.instance_name is not None


def test_the_service_accepts_the_environment_of_the_migration(rendered: Rendered) -> None:
    (container,) = template(rendered.job)["spec"]["containers"]
    settings = settings_under(rendered.environment(container))
    assert settings.namespace == rendered.settings.namespace


def test_the_job_migrates_and_the_instances_wait_for_it(rendered: Rendered) -> None:
    (container,) = template(rendered.job)["spec"]["containers"]
    assert container["command"] == ["flotilla", "migrate"]
    assert container["image"] == rendered.container["image"]
    assert not rendered.settings.migrates_on_start
    assert rendered.settings.migrate_wait > 0


def test_kubernetes_waits_as_long_as_the_ordered_shutdown_may_take(rendered: Rendered) -> None:
    assert rendered.pod["terminationGracePeriodSeconds"] == rendered.settings.grace_period


def test_no_pre_stop_hook_delays_the_signal_to_the_service(rendered: Rendered) -> None:
    assert "lifecycle" not in rendered.container


def test_readiness_fails_while_the_listener_is_still_open(rendered: Rendered) -> None:
    assert failing_time(rendered.probe("readiness")) <= rendered.settings.drain_delay_seconds


def test_a_pod_is_not_killed_while_it_waits_for_the_migration(rendered: Rendered) -> None:
    assert failing_time(rendered.probe("startup")) >= rendered.settings.migrate_wait + STARTING


def test_only_the_readiness_probe_checks_readiness_and_the_others_check_liveness(rendered: Rendered) -> None:
    paths = {name: rendered.probe(name)["httpGet"]["path"] for name in PROBES}
    assert paths == {"startup": "/health/live", "readiness": "/health/ready", "liveness": "/health/live"}


@pytest.mark.anyio
async def test_the_paths_of_the_probes_are_answered(rendered: Rendered) -> None:
    from app.main import create_app

    transport = httpx.ASGITransport(create_app(rendered.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        answers = {name: await client.get(rendered.probe(name)["httpGet"]["path"]) for name in PROBES}
    statuses = {name: answer.json()["status"] for name, answer in answers.items()}
    assert statuses == {"startup": "alive", "readiness": "starting", "liveness": "alive"}


def test_probes_and_service_use_the_port_on_which_the_service_listens(rendered: Rendered) -> None:
    assert rendered.settings.host == "0.0.0.0"  # noqa: S104 — in a pod, every interface is the pod's
    assert rendered.container["ports"] == [{"name": "http", "containerPort": rendered.settings.port}]
    (port,) = rendered.one("Service", "flotilla")["spec"]["ports"]
    assert port["targetPort"] == "http"
    assert {rendered.probe(name)["httpGet"]["port"] for name in PROBES} == {"http"}


def test_the_selectors_match_the_instances_and_not_the_migration(rendered: Rendered) -> None:
    selectors = [
        rendered.deployment["spec"]["selector"]["matchLabels"],
        rendered.one("Service", "flotilla")["spec"]["selector"],
        rendered.one("PodDisruptionBudget", "flotilla")["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in rendered.pod["topologySpreadConstraints"]),
    ]
    for selector in selectors:
        assert selects(selector, template(rendered.deployment))
        assert not selects(selector, template(rendered.job))


def test_deploys_and_node_drains_take_one_instance_at_a_time(rendered: Rendered) -> None:
    spec = rendered.deployment["spec"]
    assert spec["replicas"] >= 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    assert rendered.one("PodDisruptionBudget", "flotilla")["spec"]["maxUnavailable"] == 1


def test_instances_are_spread_over_hosts_and_zones_if_possible(rendered: Rendered) -> None:
    spread = {each["topologyKey"]: each["whenUnsatisfiable"] for each in rendered.pod["topologySpreadConstraints"]}
    assert spread == dict.fromkeys(("kubernetes.io/hostname", "topology.kubernetes.io/zone"), "ScheduleAnyway")


def test_every_pod_has_the_most_restrictive_security_settings(rendered: Rendered) -> None:
    for each in rendered.templates():
        pod = each["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert [container["securityContext"] for container in pod["containers"]] == [RESTRICTED]


def test_kubernetes_adds_no_service_variables_to_the_environment(rendered: Rendered) -> None:
    for each in rendered.templates():
        assert each["spec"]["enableServiceLinks"] is False


def test_every_image_has_a_fixed_tag(rendered: Rendered) -> None:
    for each in rendered.templates():
        for container in each["spec"]["containers"]:
            _, _, tag = container["image"].partition(":")
            assert tag not in {"", "latest"}, container["image"]


def test_every_container_declares_its_resources(rendered: Rendered) -> None:
    for each in rendered.templates():
        for container in each["spec"]["containers"]:
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"memory"}


def test_the_production_overlay_has_no_secrets_and_the_guide_creates_each(rendered: Rendered) -> None:
    guide = (ROOT / "docs/guides/deploy.md").read_text()
    included = {each["metadata"]["name"] for each in rendered.objects if each["kind"] == "Secret"}
    required = {
        source["secretRef"]["name"]
        for each in rendered.templates()
        for container in each["spec"]["containers"]
        for source in container.get("envFrom", [])
        if "secretRef" in source
    }
    for name in required - included:
        assert f"kubectl create secret generic {name} " in guide
    assert rendered.overlay == "development" or not included
