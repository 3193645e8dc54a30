"""deploy/kubernetes: what is applied fits Kubernetes' schemas, the services' own arguments, and itself."""

import argparse
import json
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.unit.deploy.kustomization import Manifest, matches, render

import weft.router.arguments
import weft.services.router
import weft.serving.main
from weft.gateway import main as gateway_arguments
from weft.gateway.main import HEALTH
from weft.v2.server import server
from weft.v2.server.health import LIVENESS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = ("base", "overlays/production", "overlays/gpu")
OURS = ("router", "preprocess", "model", "postprocess")
PORTS = {"router": 8001} | {name: weft.serving.main.GRPC_PORTS[name] for name in OURS[1:]}
KUBERNETES_VERSIONS = ("1.32", "1.34")
KEDA_SCHEMA = json.loads((Path(__file__).parent / "keda.schema.json").read_text())


@cache
def rendered(overlay: str) -> list[Manifest]:
    """All manifests."""
    return render(FOLDER / overlay)


def of_kind(overlay: str, kind: str) -> dict[str, Manifest]:
    """Manifests of one kind by name."""
    return {m["metadata"]["name"]: m for m in rendered(overlay) if m["kind"] == kind}


def pod_of(manifest: Manifest) -> dict[str, Any]:
    """The pod template of a deployment."""
    template: dict[str, Any] = manifest["spec"]["template"]
    return template


def container_of(manifest: Manifest) -> dict[str, Any]:
    """The only container of a deployment."""
    (container,) = pod_of(manifest)["spec"]["containers"]
    return dict(container)


@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_manifest_fits_the_schema(version: str) -> None:
    """Strictly: no unknown field, no value of a wrong type; KEDA's objects by the fields of its documentation."""
    manifests = {str(manifest): manifest for overlay in OVERLAYS for manifest in rendered(overlay)}  # many are alike
    for manifest in manifests.values():
        if manifest["kind"] == "ScaledObject":
            jsonschema.validate(manifest, KEDA_SCHEMA)
        else:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_the_inside_keys_reach_who_checks_and_who_shows_them(tmp_path: Path) -> None:
    """The model services check the key that the router sends to its targets; each has only its own Secret."""
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [str(FOLDER / "base")], "components": [str(FOLDER / "components/inside-keys")]})
    )
    for manifest in (one for one in render(tmp_path) if one["kind"] == "Deployment"):
        name, container, spec = manifest["metadata"]["name"], container_of(manifest), pod_of(manifest)["spec"]
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[0], strict=True)
        (secret,) = (volume["secret"] for volume in spec["volumes"] if "secret" in volume)
        assert secret == {"secretName": "inside-key" if name == "router" else "inside-keys", "defaultMode": 0o440}
        assert {"name": "inside", "mountPath": "/etc/weft", "readOnly": True} in container["volumeMounts"]
        keys = [argument for argument in container["args"] if "/etc/weft/" in argument]
        shown = [f"--target-key-file={target}=/etc/weft/inside.key" for target in OURS[1:]]
        assert keys == (shown if name == "router" else ["--auth-keys=/etc/weft/inside.keys"])


def test_the_check_finds_a_wrong_field() -> None:
    """A field with a typing error does not pass."""
    broken = json.loads(json.dumps(of_kind("base", "Deployment")["router"]))
    container = broken["spec"]["template"]["spec"]["containers"][0]
    container["readinesProbe"] = container.pop("readinessProbe")
    with pytest.raises(kubernetes_validate.ValidationError, match="readinesProbe"):
        kubernetes_validate.validate(broken, KUBERNETES_VERSIONS[0], strict=True)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_renders_the_same(overlay: str) -> None:
    """The manifests tested here are those that ``kubectl apply -k`` sends, but for namespace and labels."""
    by_kustomize = subprocess.run(
        ["kubectl", "kustomize", str(FOLDER / overlay)], capture_output=True, text=True, check=True
    ).stdout
    theirs = {(m["kind"], m["metadata"]["name"]): m for m in yaml.safe_load_all(by_kustomize)}
    ours = {(m["kind"], m["metadata"]["name"]): m for m in rendered(overlay) if m["kind"] != "ConfigMap"}
    assert ours.keys() == {key for key in theirs if key[0] != "ConfigMap"}
    for key, manifest in ours.items():
        if key[0] == "Deployment":
            want, got = container_of(manifest), container_of(theirs[key])
            assert {**want, "image": want["image"].partition(":")[0]} == {
                **got,
                "image": got["image"].partition(":")[0],
            }
        elif key[0] not in ("RoleBinding", "Namespace"):
            assert manifest.get("spec") == theirs[key].get("spec"), key


@pytest.mark.parametrize("name", OURS)
def test_a_service_understands_its_arguments(name: str, tmp_path: Path) -> None:
    """The arguments of the container, after those of the image's entry point, are the service's own."""
    if name == "router":
        parser = weft.services.router.make_parser("weft.router", "")
    else:
        parser = argparse.ArgumentParser()
        weft.serving.main.add_arguments(parser)
        server.add_arguments(parser, grpc_port=0, metrics_port=0)
    options = parser.parse_args(
        ["--repository", str(tmp_path), *container_of(of_kind("base", "Deployment")[name])["args"]]
    )
    stop_s = (
        options.grace_s + container_of(of_kind("base", "Deployment")[name])["lifecycle"]["preStop"]["sleep"]["seconds"]
    )
    assert stop_s < pod_of(of_kind("base", "Deployment")[name])["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", OURS)
def test_ports_and_probes_are_those_of_the_service(name: str) -> None:
    """A pod opens the service's ports; probes ask its gRPC port for a name that its health service knows."""
    container = container_of(of_kind("base", "Deployment")[name])
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"grpc": PORTS[name], "metrics": PORTS[name] + 1}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["grpc"]["port"] == PORTS[name]
        assert container[probe]["grpc"].get("service", "") in ("", LIVENESS, server.SERVICE_NAME)
    assert container["livenessProbe"]["grpc"]["service"] == LIVENESS


def test_the_gateway_is_what_its_component_says() -> None:
    """It understands its arguments, opens its own ports, is asked for its health there, and ends within its grace."""
    deployment = of_kind("overlays/production", "Deployment")["gateway"]
    container, pod = container_of(deployment), pod_of(deployment)["spec"]
    options = gateway_arguments.make_parser().parse_args(container["args"])
    assert "" == gateway_arguments.fault_of(options)
    stop_s = options.grace_s + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert stop_s < pod["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {"http": options.port, "metrics": options.metrics_port} == ports
    assert {"path": HEALTH, "port": "http"} == container["readinessProbe"]["httpGet"]
    assert options.watchdog_abort_s > 0
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in [variable["name"] for variable in container["env"]]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_whatever_is_named_is_there(overlay: str) -> None:
    """What selects pods finds some; hosts in arguments and variables are Services that have the port."""
    deployments, services = of_kind(overlay, "Deployment"), of_kind(overlay, "Service")
    labels = [pod_of(manifest)["metadata"]["labels"] for manifest in deployments.values()]
    selectors = [
        (m, m["spec"]["selector"])
        for kind in ("Service", "PodDisruptionBudget")
        for m in of_kind(overlay, kind).values()
    ]
    selectors += [(m, m["spec"]["podSelector"]) for m in of_kind(overlay, "NetworkPolicy").values()]
    for manifest, selector in selectors:
        assert any(matches(selector, found) for found in labels), manifest["metadata"]["name"]
    for kind in ("HorizontalPodAutoscaler", "ScaledObject"):
        for manifest in of_kind(overlay, kind).values():
            name = manifest["spec"]["scaleTargetRef"]["name"]
            assert "replicas" not in deployments[name]["spec"], "an autoscaler owns the number"
            assert name == manifest["metadata"]["name"]
    addresses = []
    for manifest in deployments.values():
        container = container_of(manifest)
        addresses += [
            argument.rpartition("dns:///")[2] for argument in container.get("args", []) if "dns:///" in argument
        ]
        addresses += [v["value"].rpartition("//")[2] for v in container.get("env", []) if "//" in v.get("value", "")]
    assert len(addresses) >= 6
    for address in addresses:
        host, _, port = address.rpartition(":")
        assert int(port) in [entry["port"] for entry in services[host]["spec"]["ports"]], address


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_two_pods_of_each_service_hold_through_rollouts_drains_and_other_overlays(overlay: str) -> None:
    """The number is an autoscaler's, two at least, which KEDA takes over by its name.

    Pods of one rollout are spread by themselves, and crashing pods do not stop a drain.
    """
    deployments = {name: one for name, one in of_kind(overlay, "Deployment").items() if name in (*OURS, "gateway")}
    floors = {name: one["spec"]["minReplicas"] for name, one in of_kind(overlay, "HorizontalPodAutoscaler").items()}
    scaled = of_kind(overlay, "ScaledObject")
    assert floors == dict.fromkeys(OURS, 2)
    for name, one in scaled.items():
        assert name == one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"]
        assert {"scaledobject.keda.sh/transfer-hpa-ownership": "true"} == one["metadata"]["annotations"]
    for deployment in deployments.values():
        (constraint,) = pod_of(deployment)["spec"]["topologySpreadConstraints"]
        assert ["pod-template-hash"] == constraint["matchLabelKeys"]
    budgets = of_kind(overlay, "PodDisruptionBudget")
    assert budgets.keys() == deployments.keys()
    assert {"AlwaysAllow"} == {one["spec"]["unhealthyPodEvictionPolicy"] for one in budgets.values()}


def test_a_load_of_any_length_is_not_ended_by_a_probe() -> None:
    """Started is what turns its event loop; only readiness asks for the models."""
    for name in OURS:
        container = container_of(of_kind("base", "Deployment")[name])
        assert LIVENESS == container["startupProbe"]["grpc"]["service"]
        assert "service" not in container["readinessProbe"]["grpc"]


@pytest.mark.parametrize(
    "component", ["models-image", "models-from-storage", "egress", "inside-keys", "mesh-key", "rollouts"]
)
def test_a_component_goes_with_base(tmp_path: Path, component: str) -> None:
    """What it makes of base fits the schema; models come from one volume of the name that is mounted."""
    folders = {"resources": [str(FOLDER / "base")], "components": [str(FOLDER / "components" / component)]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(folders))
    for manifest in render(tmp_path):
        kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[-1], strict=True)
        if manifest["kind"] == "Deployment":
            volumes = [volume["name"] for volume in pod_of(manifest)["spec"]["volumes"]]
            assert 1 == volumes.count("models")


def test_routers_share_the_lease_that_their_role_names(tmp_path: Path) -> None:
    """They may make Leases, and read and change that of ``--rollouts``; egress lets them reach the API server."""
    components = [str(FOLDER / "components" / name) for name in ("egress", "rollouts")]
    (tmp_path / "kustomization.yaml").write_text(
        yaml.safe_dump({"resources": [str(FOLDER / "base")], "components": components})
    )
    found = {(one["kind"], one["metadata"]["name"]): one for one in render(tmp_path)}
    router = found["Deployment", "router"]
    parser = weft.services.router.make_parser("router", "")
    options = parser.parse_args(["--repository", "graphs", *container_of(router)["args"]])
    assert not weft.router.arguments.usage_fault(options)
    _, _, name = options.rollouts.partition("lease:weft/")
    create, change = found["Role", "rollouts"]["rules"]
    assert (["create"], [name], ["get", "update"]) == (create["verbs"], change["resourceNames"], change["verbs"])
    (subject,) = found["RoleBinding", "rollouts"]["subjects"]
    pod = pod_of(router)
    assert subject["name"] == pod["spec"]["serviceAccountName"] == found["ServiceAccount", "router"]["metadata"]["name"]
    assert pod["spec"]["automountServiceAccountToken"]
    policy = found["NetworkPolicy", "rollouts-to-api-server"]["spec"]
    assert matches(policy["podSelector"], pod["metadata"]["labels"])


def test_deleting_an_overlay_leaves_the_models() -> None:
    """The claim is a kustomization of its own."""
    assert not any(of_kind(overlay, "PersistentVolumeClaim") for overlay in OVERLAYS)
    (claim,) = render(FOLDER / "models")
    mounted = pod_of(of_kind("base", "Deployment")["model"])["spec"]["volumes"][0]
    assert mounted["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_call_of_the_mesh_is_allowed(overlay: str) -> None:
    """Each service reaches what its arguments name, through the policies that apply to the pods behind it."""
    deployments, services = of_kind(overlay, "Deployment"), of_kind(overlay, "Service")
    policies = of_kind(overlay, "NetworkPolicy").values()
    for caller, manifest in deployments.items():
        here = pod_of(manifest)["metadata"]["labels"]
        for argument in container_of(manifest).get("args", []):
            host, _, _ = argument.rpartition("dns:///")[2].rpartition(":")
            if not host or "dns:///" not in argument:
                continue
            there = services[host]["spec"]["selector"]
            allowed = [
                peer
                for policy in policies
                if matches(policy["spec"]["podSelector"], there)
                for rule in policy["spec"].get("ingress", [])
                if {"port": "grpc"} in rule["ports"]
                for peer in rule["from"]
            ]
            assert any("podSelector" in peer and matches(peer["podSelector"], here) for peer in allowed), (caller, host)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_may_more_than_it_must(overlay: str) -> None:
    """The restricted pod security standard: no root, no privileges, no capability; the models are read only."""
    for name, manifest in of_kind(overlay, "Deployment").items():
        pod, container = pod_of(manifest)["spec"], container_of(manifest)
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert "memory" in container["resources"]["limits"]
        if name in OURS:
            assert all(mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] == "models")


def test_only_the_gpu_overlay_asks_for_a_gpu() -> None:
    """There each model pod has one, and tolerates the taint of GPU nodes."""
    for overlay in OVERLAYS:
        limits = container_of(of_kind(overlay, "Deployment")["model"])["resources"]["limits"]
        assert limits.get("nvidia.com/gpu") == (1 if overlay == "overlays/gpu" else None)


def test_the_model_service_scales_to_zero_and_wakes() -> None:
    """KEDA takes it to no pod, and the first request, which only the router sees, is above the activation threshold."""
    spec = of_kind("overlays/production", "ScaledObject")["model"]["spec"]
    assert spec["minReplicaCount"] == 0
    waking = [trigger for trigger in spec["triggers"] if trigger["metadata"].get("activationThreshold") == "0"]
    assert "weft_target_unavailable_total" in waking[0]["metadata"]["query"]
    targets = [arg for arg in container_of(of_kind("base", "Deployment")["router"])["args"] if "--target=model=" in arg]
    assert targets, "the query asks by the target's name"


def test_keda_finds_prometheus_from_its_own_namespace() -> None:
    """A bare name would be looked for in the namespace of KEDA: the address names that of the mesh, and its port."""
    file = (FOLDER / "overlays/production/kustomization.yaml").read_text()
    namespace = yaml.safe_load(file)["namespace"]
    (port,) = of_kind("overlays/production", "Service")["prometheus"]["spec"]["ports"]
    addresses = [
        trigger["metadata"]["serverAddress"]
        for scaled in of_kind("overlays/production", "ScaledObject").values()
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    assert set(addresses) == {f"http://prometheus.{namespace}.svc:{port['port']}"}
    adapter = yaml.safe_load((FOLDER / "components/hpa/prometheus-adapter.yaml").read_text())["prometheus"]
    assert set(addresses) == {f"{adapter['url']}:{adapter['port']}"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_an_autoscaler_goes_by_is_collected(overlay: str) -> None:
    """Where one asks for more than Kubernetes measures itself, there is a Prometheus that scrapes the pods."""
    asks = any(
        trigger["type"] == "prometheus"
        for one in of_kind(overlay, "ScaledObject").values()
        for trigger in one["spec"]["triggers"]
    )
    asks |= any(
        metric["type"] == "Pods"
        for one in of_kind(overlay, "HorizontalPodAutoscaler").values()
        for metric in one["spec"]["metrics"]
    )
    assert asks == ("prometheus" in of_kind(overlay, "Deployment"))
