"""Every overlay, with each component, rendered by kubectl, agrees with the settings of the service that runs in it.

The numbers of a deployment are in the manifests and in the settings, and must agree. These tests read both.
"""

import base64
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from app.fleet.role import Role
from app.settings import Settings
from tests.deploy import custom_resources
from tests.deploy.declared import ADDRESS, API_KEYS, NAME, ROOT, settings_under
from tests.support.fleet import run
from tests.support.pages import blocks
from tests.support.tools import program

NEWEST = kubernetes_validate.latest_version()
OVERLAYS = sorted(each.name for each in (ROOT / "k8s/overlays").iterdir())
COMPONENTS = sorted(each.name for each in (ROOT / "k8s/components").iterdir())
# The secrets that the guide asks the operator to create.
SECRETS: dict[str, dict[str, str]] = {
    NAME: {"DATABASE_URL": ADDRESS, "FLOTILLA_API_KEYS": API_KEYS},
    f"{NAME}-migration": {"DATABASE_URL": ADDRESS},
}
# The secrets that an operator makes by itself.
OPERATOR_SECRETS = {f"{NAME}-postgres-app": {"uri": ADDRESS}}
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
FIELDS = {"metadata.name": f"{NAME}-7c6d8f9b5-x2x4z"}

Object = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """An overlay with these components, and the Deployment that a test looks at."""

    overlay: str
    components: tuple[str, ...] = ()
    deployment: str = NAME

    def __str__(self) -> str:
        return "-".join((self.overlay, *self.components, self.deployment))


CASES = [
    *(Case(overlay) for overlay in OVERLAYS),
    *(Case(overlay, ("roles",), name) for overlay in OVERLAYS for name in (NAME, f"{NAME}-worker")),
    *(Case(overlay, (each,)) for overlay in OVERLAYS for each in ("monitoring", "gateway", "cloudnative-pg")),
    *(Case(overlay, ("roles", "autoscaling"), name) for overlay in OVERLAYS for name in (NAME, f"{NAME}-worker")),
]


@dataclass(frozen=True)
class Rendered:
    """The objects of a case as the API server would receive them."""

    case: Case
    objects: list[Object]

    def one(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.objects if each["kind"] == kind and each["metadata"]["name"] == name)
        return found

    @cached_property
    def deployment(self) -> Object:
        return self.one("Deployment", self.case.deployment)

    @property
    def pod(self) -> Object:
        spec: Object = template(self.deployment)["spec"]
        return spec

    @property
    def migration(self) -> Object:
        only: Object
        (only,) = self.pod["initContainers"]
        return only

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

    def containers(self) -> Iterator[Object]:
        for each in self.templates():
            yield from (*each["spec"].get("initContainers", []), *each["spec"]["containers"])

    def environment(self, container: Object) -> dict[str, str]:
        """Return the environment that the kubelet would build: of equal names, the last one applies."""
        found: dict[str, str] = {}
        for source in container["envFrom"]:
            if "configMapRef" in source:
                found |= self.one("ConfigMap", source["configMapRef"]["name"])["data"]
            else:
                found |= self.secret(source["secretRef"]["name"])
        for each in container.get("env", []):
            source = each.get("valueFrom", {})
            if "secretKeyRef" in source:
                found[each["name"]] = OPERATOR_SECRETS[source["secretKeyRef"]["name"]][source["secretKeyRef"]["key"]]
            else:
                found[each["name"]] = each["value"] if not source else FIELDS[source["fieldRef"]["fieldPath"]]
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


@cache
def objects_of(overlay: str, components: tuple[str, ...]) -> list[Object]:
    """Render an overlay with these components, inserted as the guides say."""
    kubectl = program("kubectl")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "k8s", Path(folder) / "k8s")
        path = Path(folder) / "k8s/overlays" / overlay
        file = path / "kustomization.yaml"
        content = yaml.safe_load(file.read_text())
        if components:
            content["components"] = [f"../../components/{each}" for each in components]
        if "autoscaling" in components:
            del content["replicas"]
        file.write_text(yaml.safe_dump(content))
        done = subprocess.run([kubectl, "kustomize", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module", params=CASES, ids=str)
def rendered(request: pytest.FixtureRequest) -> Rendered:
    case: Case = request.param
    return Rendered(case, objects_of(case.overlay, case.components))


def test_there_is_an_overlay_for_development_and_one_for_production() -> None:
    assert OVERLAYS == ["development", "production"]


def test_every_component_is_rendered_with_every_overlay() -> None:
    assert {(case.overlay, each) for case in CASES for each in case.components} == {
        (overlay, each) for overlay in OVERLAYS for each in COMPONENTS
    }


def test_every_object_is_valid_for_kubernetes(rendered: Rendered) -> None:
    for each in rendered.objects:
        if custom_resources.is_custom(each):
            custom_resources.validate(each)
        else:
            kubernetes_validate.validate(each, NEWEST, strict=True)


def test_the_service_accepts_the_environment_of_its_pod(rendered: Rendered) -> None:
    assert rendered.settings.environment == rendered.case.overlay
    assert rendered.settings.instance_name is not None


def test_the_service_accepts_the_environment_of_the_migration(rendered: Rendered) -> None:
    settings = settings_under(rendered.environment(rendered.migration))
    assert settings.namespace == rendered.settings.namespace


def test_a_pod_migrates_before_its_instance_starts_and_only_that_container_has_the_secret(rendered: Rendered) -> None:
    assert rendered.migration["command"][:2] == ["flotilla", "migrate"]
    assert rendered.migration["image"] == rendered.container["image"]
    assert not rendered.settings.migrates_on_start
    own, migration = (
        [source["secretRef"]["name"] for source in each["envFrom"] if "secretRef" in source]
        for each in (rendered.container, rendered.migration)
    )
    assert migration == [*own, f"{NAME}-migration"]
    assert len(own) == 1


def test_the_command_line_accepts_the_arguments_of_the_migration(rendered: Rendered) -> None:
    nowhere = "postgresql://flotilla@127.0.0.1:9/flotilla"
    found = run(*rendered.migration["command"][1:], address=nowhere)
    assert found.returncode == 4, "only the database is missing"


def test_applying_a_commit_twice_or_the_next_one_needs_no_manual_step(rendered: Rendered) -> None:
    """The template of a Job is immutable, and so are the selectors of a Deployment: neither may depend on a release."""
    assert not [each for each in rendered.objects if each["kind"] in {"Job", "Pod"}]
    labels = {"app.kubernetes.io/name", "app.kubernetes.io/component"}
    for each in rendered.objects:
        assert "generateName" not in each["metadata"]
        if each["kind"] == "Deployment" and each["metadata"]["name"].startswith(NAME):
            assert set(each["spec"]["selector"]["matchLabels"]) <= labels


def test_kubernetes_waits_as_long_as_the_ordered_shutdown_may_take(rendered: Rendered) -> None:
    assert rendered.pod["terminationGracePeriodSeconds"] == rendered.settings.grace_period


def test_no_pre_stop_hook_delays_the_signal_to_the_service(rendered: Rendered) -> None:
    assert "lifecycle" not in rendered.container


def test_readiness_fails_while_the_listener_is_still_open(rendered: Rendered) -> None:
    if rendered.settings.role.serves:
        assert failing_time(rendered.probe("readiness")) <= rendered.settings.drain_delay_seconds
    else:
        assert rendered.settings.drain_delay_seconds == 0, "no load balancer sends requests to a worker"


def test_a_pod_is_not_killed_while_it_starts_or_migrates(rendered: Rendered) -> None:
    assert failing_time(rendered.probe("startup")) >= STARTING
    assert not [name for name in rendered.migration if name.endswith("Probe")]


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
    (port,) = rendered.one("Service", NAME)["spec"]["ports"]
    assert port["targetPort"] == "http"
    assert {rendered.probe(name)["httpGet"]["port"] for name in PROBES} == {"http"}


def test_the_selectors_of_a_deployment_match_its_pods_and_no_others(rendered: Rendered) -> None:
    selectors = [
        rendered.deployment["spec"]["selector"]["matchLabels"],
        rendered.one("PodDisruptionBudget", rendered.case.deployment)["spec"]["selector"]["matchLabels"],
        *(each["labelSelector"]["matchLabels"] for each in rendered.pod["topologySpreadConstraints"]),
    ]
    own = template(rendered.deployment)
    for selector in selectors:
        assert [pod for pod in rendered.templates() if selects(selector, pod)] == [own]


def test_the_service_leads_to_the_instances_that_serve_and_to_no_others(rendered: Rendered) -> None:
    selector = rendered.one("Service", NAME)["spec"]["selector"]
    assert selects(selector, template(rendered.deployment)) is rendered.settings.role.serves


def test_the_component_roles_has_web_instances_and_workers_and_nothing_else_sets_a_role(rendered: Rendered) -> None:
    expected = {NAME: Role.WEB, f"{NAME}-worker": Role.WORKER} if "roles" in rendered.case.components else {}
    assert rendered.settings.role is expected.get(rendered.case.deployment, Role.ALL)


def test_deploys_and_node_drains_take_one_instance_at_a_time(rendered: Rendered) -> None:
    spec = rendered.deployment["spec"]
    if "autoscaling" in rendered.case.components:
        assert "replicas" not in spec, "each deploy would set the number back"
    else:
        assert spec["replicas"] >= 2
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    budget = rendered.one("PodDisruptionBudget", rendered.case.deployment)["spec"]
    assert budget["maxUnavailable"] == 1
    # In an outage of the database no instance is ready, and nodes can be drained all the same.
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_other_pods_reach_only_the_port_of_the_service(rendered: Rendered) -> None:
    policy = rendered.one("NetworkPolicy", NAME)["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    assert policy["ingress"] == [{"ports": [{"port": "http"}]}]
    assert selects(policy["podSelector"]["matchLabels"], template(rendered.deployment))


def test_the_pods_have_an_account_without_rights(rendered: Rendered) -> None:
    assert rendered.pod["serviceAccountName"] == NAME
    assert rendered.one("ServiceAccount", NAME)["automountServiceAccountToken"] is False


def test_instances_are_spread_over_hosts_and_zones_if_possible(rendered: Rendered) -> None:
    spread = {each["topologyKey"]: each["whenUnsatisfiable"] for each in rendered.pod["topologySpreadConstraints"]}
    assert spread == dict.fromkeys(("kubernetes.io/hostname", "topology.kubernetes.io/zone"), "ScheduleAnyway")


def test_every_pod_has_the_most_restrictive_security_settings(rendered: Rendered) -> None:
    for each in rendered.templates():
        pod = each["spec"]
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert all(container["securityContext"] == RESTRICTED for container in rendered.containers())


def test_kubernetes_adds_no_service_variables_to_the_environment(rendered: Rendered) -> None:
    for each in rendered.templates():
        assert each["spec"]["enableServiceLinks"] is False


@pytest.mark.template
@pytest.mark.parametrize("page", ["monitor.md", "roles.md", "scale.md"])
def test_a_component_that_a_guide_inserts_is_one_that_is_rendered_here(page: str) -> None:
    (block,) = (each for each in blocks(ROOT / "docs" / "guides" / page) if each.language == "yaml")
    overlay = ROOT / "k8s" / "overlays" / "production"
    for component in yaml.safe_load(block.text)["components"]:
        path = (overlay / component).resolve()
        assert (path / "kustomization.yaml").exists()
        assert path.name in COMPONENTS


def test_every_image_has_a_fixed_tag(rendered: Rendered) -> None:
    for container in rendered.containers():
        _, _, tag = container["image"].partition(":")
        assert tag not in {"", "latest"}, container["image"]


def test_every_container_declares_its_resources(rendered: Rendered) -> None:
    for container in rendered.containers():
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert container["resources"]["limits"].keys() == {"memory"}


@pytest.mark.template
def test_the_production_overlay_has_no_secrets_and_the_guide_creates_each(rendered: Rendered) -> None:
    guide = (ROOT / "docs/guides/deploy.md").read_text()
    included = {each["metadata"]["name"] for each in rendered.objects if each["kind"] == "Secret"}
    required = {
        source["secretRef"]["name"]
        for container in rendered.containers()
        for source in container.get("envFrom", [])
        if "secretRef" in source
    }
    for name in required - included:
        assert f"kubectl create secret generic {name} " in guide
    assert rendered.case.overlay == "development" or not included
