"""Every overlay, rendered by kubectl, agrees with the settings of the service that runs in it.

The numbers of a deployment live in two places, the manifests and the settings, and each is right only beside the other.
These tests read both.
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
# What the guide tells the person who deploys to make.
SECRETS: dict[str, dict[str, str]] = {
    "flotilla": {"DATABASE_URL": ADDRESS, "FLOTILLA_API_KEYS": API_KEYS},
    "flotilla-migration": {"DATABASE_URL": ADDRESS},
}
PROBES = ("startup", "readiness", "liveness")
# What Pod Security's level "restricted" asks of a container, and what we ask besides.
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# What a start may take besides waiting for the migration: the pool's first connections, and joining.
STARTING = 10

# A name as a Deployment gives it to a pod.
FIELDS = {"metadata.name": "flotilla-7c6d8f9b5-x2x4z"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """An overlay as the API server would be given it."""

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
        """What the kubelet would put together; where two sources have a name, the last one counts."""
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


def window(probe: Object) -> int:
    """How long a probe must fail until it has failed."""
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


def test_there_is_an_overlay_to_try_it_and_one_to_run_it() -> None:
    assert OVERLAYS == ["development", "production"]


def test_every_object_is_one_that_kubernetes_knows(rendered: Rendered) -> None:
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


def test_nothing_sleeps_before_the_service_hears_of_its_end(rendered: Rendered) -> None:
    assert "lifecycle" not in rendered.container


def test_readiness_fails_while_the_listener_is_still_open(rendered: Rendered) -> None:
    assert window(rendered.probe("readiness")) <= rendered.settings.drain_delay_seconds


def test_a_pod_that_waits_for_the_migration_is_not_killed_for_it(rendered: Rendered) -> None:
    assert window(rendered.probe("startup")) >= rendered.settings.migrate_wait + STARTING


def test_readiness_asks_whether_it_is_ready_and_the_others_only_whether_it_lives(rendered: Rendered) -> None:
    paths = {name: rendered.probe(name)["httpGet"]["path"] for name in PROBES}
    assert paths == {"startup": "/health/live", "readiness": "/health/ready", "liveness": "/health/live"}


@pytest.mark.anyio
async def test_the_paths_of_the_probes_are_answered(rendered: Rendered) -> None:
    from app.main import create_app

    transport = httpx.ASGITransport(create_app(rendered.settings))
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        answers = {name: await client.get(rendered.probe(name)["httpGet"]["path"]) for name in PROBES}
    said = {name: answer.json()["status"] for name, answer in answers.items()}
    assert said == {"startup": "alive", "readiness": "starting", "liveness": "alive"}


def test_probes_and_service_reach_the_port_it_listens_on(rendered: Rendered) -> None:
    assert rendered.settings.host == "0.0.0.0"  # noqa: S104 — in a pod, every interface is the pod's
    assert rendered.container["ports"] == [{"name": "http", "containerPort": rendered.settings.port}]
    (port,) = rendered.one("Service", "flotilla")["spec"]["ports"]
    assert port["targetPort"] == "http"
    assert {rendered.probe(name)["httpGet"]["port"] for name in PROBES} == {"http"}


def test_service_budget_and_spread_are_about_the_instances_and_not_about_the_migration(rendered: Rendered) -> None:
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


def test_instances_are_spread_over_hosts_and_zones_but_never_kept_from_starting(rendered: Rendered) -> None:
    spread = {each["topologyKey"]: each["whenUnsatisfiable"] for each in rendered.pod["topologySpreadConstraints"]}
    assert spread == dict.fromkeys(("kubernetes.io/hostname", "topology.kubernetes.io/zone"), "ScheduleAnyway")


def test_every_pod_is_as_restricted_as_can_be(rendered: Rendered) -> None:
    for each in rendered.templates():
        pod = each["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert [container["securityContext"] for container in pod["containers"]] == [RESTRICTED]


def test_kubernetes_adds_no_names_of_its_own_to_the_environment(rendered: Rendered) -> None:
    for each in rendered.templates():
        assert each["spec"]["enableServiceLinks"] is False


def test_every_image_has_a_tag_that_stays_what_it_is(rendered: Rendered) -> None:
    for each in rendered.templates():
        for container in each["spec"]["containers"]:
            _, _, tag = container["image"].partition(":")
            assert tag not in {"", "latest"}, container["image"]


def test_every_container_says_what_it_needs(rendered: Rendered) -> None:
    for each in rendered.templates():
        for container in each["spec"]["containers"]:
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}
            assert container["resources"]["limits"].keys() == {"memory"}


def test_production_brings_no_secret_with_it_and_the_guide_names_each(rendered: Rendered) -> None:
    guide = (ROOT / "docs/guides/deploy.md").read_text()
    brought = {each["metadata"]["name"] for each in rendered.objects if each["kind"] == "Secret"}
    wanted = {
        source["secretRef"]["name"]
        for each in rendered.templates()
        for container in each["spec"]["containers"]
        for source in container.get("envFrom", [])
        if "secretRef" in source
    }
    for name in wanted - brought:
        assert f"kubectl create secret generic {name} " in guide
    assert rendered.overlay == "development" or not brought
