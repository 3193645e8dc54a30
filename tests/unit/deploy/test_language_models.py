"""deploy/kubernetes for language models: ranks over several pods, roles, and pools behind an endpoint picker."""

import argparse
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.unit.deploy.kustomization import Manifest, matches, render
from tests.unit.deploy.test_kubernetes import FOLDER, KEDA_SCHEMA, KUBERNETES_VERSIONS

import weft.services.router
import weft.serving.main
from weft.backends.llm.metric_names import CONVENTIONS, PREFIX
from weft.gateway import main as gateway
from weft.v2.server import server

COMPONENTS = {
    "ranks": ["ranks"],
    "ranks-stateful-set": ["ranks-stateful-set"],
    "prefill-decode": ["prefill-decode", "prefill-decode-keda"],
    "inference-pool": ["inference-pool"],
}
#: Kinds of definitions of others, which the exam checks against their own schemas.
OTHERS = {"LeaderWorkerSet", "InferencePool", "HTTPRoute"}


@pytest.fixture(params=COMPONENTS)
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    """Those of base with a component."""
    return rendered(tmp_path, request.param)


def rendered(folder: Path, name: str) -> list[Manifest]:
    """Those of base with the components of a name."""
    text = {
        "resources": [str(FOLDER / "base")],
        "components": [str(FOLDER / "components" / c) for c in COMPONENTS[name]],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return render(folder)


def pods_of(manifest: Manifest) -> list[dict[str, Any]]:
    """The pod templates, with what a controller adds to their labels."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "LeaderWorkerSet":
        pair = [spec["leaderWorkerTemplate"][f"{role}Template"] for role in ("leader", "worker")]
        for index, template in enumerate(pair):
            template["metadata"]["labels"]["leaderworkerset.sigs.k8s.io/worker-index"] = str(index)
        return pair
    if manifest["kind"] == "StatefulSet":
        spec["template"]["metadata"]["labels"]["apps.kubernetes.io/pod-index"] = "0"
    return [spec["template"]] if "template" in spec else []


def options_of(container: dict[str, Any], folder: Path) -> argparse.Namespace:
    """The arguments of a container, as the program of its image reads them."""
    arguments = [one.replace("$(LWS_LEADER_ADDRESS)", "leader") for one in container["args"]]
    if container["image"] == "weft-gateway":
        return gateway.make_parser().parse_args(arguments)
    if container["image"] == "weft-router":
        return weft.services.router.make_parser("weft.router", "").parse_args(["--repository", str(folder), *arguments])
    parser = argparse.ArgumentParser()
    weft.serving.main.add_arguments(parser)
    server.add_arguments(parser, grpc_port=8021, metrics_port=8022)
    return parser.parse_args(["--repository", str(folder), *arguments])


def test_every_manifest_fits_the_schema(manifests: list[Manifest]) -> None:
    """Strictly; pods of a LeaderWorkerSet as pods, KEDA's objects by the fields of its documentation."""
    for manifest in manifests:
        if manifest["kind"] == "ScaledObject":
            jsonschema.validate(manifest, KEDA_SCHEMA)
        elif manifest["kind"] not in OTHERS:
            kubernetes_validate.validate(manifest, KUBERNETES_VERSIONS[-1], strict=True)
        elif manifest["kind"] == "LeaderWorkerSet":
            for template in pods_of(manifest):
                pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
                kubernetes_validate.validate(pod, KUBERNETES_VERSIONS[-1], strict=True)


def test_whatever_is_named_is_there(manifests: list[Manifest], tmp_path: Path) -> None:
    """Selectors find pods, arguments understand themselves, hosts are Services with the port, files are mounted."""
    templates = [template for manifest in manifests for template in pods_of(manifest)]
    labels = [template["metadata"]["labels"] for template in templates]
    services = {one["metadata"]["name"]: one["spec"] for one in manifests if one["kind"] == "Service"}
    for manifest in manifests:
        spec = manifest.get("spec", {})
        for field in ("selector", "podSelector"):
            if field in spec:
                assert any(matches(spec[field], found) for found in labels), manifest["metadata"]["name"]
    for template in templates:
        for container in template["spec"]["containers"]:
            mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
            if "command" not in container:
                options = options_of(container, tmp_path)
                assert options.grace_s < template["spec"]["terminationGracePeriodSeconds"]
            for argument in container.get("args", []):
                if "dns:///" in argument:
                    host, _, port = argument.rpartition("dns:///")[2].partition(":")
                    assert int(port) in [entry["port"] for entry in services[host]["ports"]], argument
                for word in shlex.split(argument, comments=True) if "/etc/" in argument else ():
                    if "/etc/" in word:
                        assert any(word.partition("=")[2].startswith(path + "/") for path in mounts), word
            secrets = [v["secret"] for v in template["spec"]["volumes"] if "secret" in v]
            assert all(secret["defaultMode"] == 0o440 for secret in secrets)
            assert template["spec"]["securityContext"].get("fsGroup") == (65534 if secrets else None)


def test_no_pod_may_more_than_it_must(manifests: list[Manifest]) -> None:
    """The restricted pod security standard, models read only."""
    for template in (template for manifest in manifests for template in pods_of(manifest)):
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        for container in template["spec"]["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert not container["securityContext"]["allowPrivilegeEscalation"]
            assert "memory" in container["resources"]["limits"]
            assert all(mount["readOnly"] for mount in container["volumeMounts"] if mount["name"] == "models")


@pytest.mark.parametrize("name", ["ranks", "ranks-stateful-set"])
def test_ranks_reach_one_another_on_all_ports_and_nobody_else_does(tmp_path: Path, name: str) -> None:
    """The router has the gRPC port alone; its target are leaders, and workers are told their address."""
    manifests = rendered(tmp_path, name)
    named = [one for one in manifests if one["metadata"]["name"] == "language-model"]
    (policy,) = (one["spec"] for one in named if one["kind"] == "NetworkPolicy")
    assert policy["ingress"][0] == {"from": [{"podSelector": policy["podSelector"]}]}
    assert all(rule["ports"] in ([{"port": "grpc"}], [{"port": "metrics"}]) for rule in policy["ingress"][1:])
    (group,) = (one for one in manifests if one["kind"] in ("LeaderWorkerSet", "StatefulSet"))
    (service,) = (one for one in named if one["kind"] == "Service")
    found = [matches(service["spec"]["selector"], template["metadata"]["labels"]) for template in pods_of(group)]
    assert found == ([True, False] if name == "ranks" else [True])
    text = yaml.safe_dump(group)
    text_of_worker = " ".join(pods_of(group)[-1]["spec"]["containers"][0]["args"])
    arguments = text_of_worker.replace("\\\n", " ").replace("$(LWS_LEADER_ADDRESS)", "leader")
    command = [
        sys.executable,
        "-m",
        "weft.services.ranks",
        *shlex.split(arguments.rpartition("weft.services.ranks")[2]),
    ]
    told = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "rank.key" in told.stderr  # which is not here; the rest is understood
    assert "usage" not in told.stderr
    assert all(words in text for words in ("weft.services.ranks", ":8024"))
    assert group["spec"].get("podManagementPolicy", "Parallel") == "Parallel"


def test_roles_scale_by_what_the_engine_counts(tmp_path: Path) -> None:
    """Prefill by its queue, decode by its KV caches; the adapter and KEDA ask for metrics that there are."""
    ours = {PREFIX + name for name, _, _ in CONVENTIONS["vllm"]}
    manifests = rendered(tmp_path, "prefill-decode")
    scaled = {
        one["metadata"]["name"]: [metric["pods"]["metric"]["name"] for metric in one["spec"]["metrics"]]
        for one in manifests
        if one["kind"] == "HorizontalPodAutoscaler" and one["metadata"]["name"] in ("prefill", "decode")
    }
    assert scaled == {
        "prefill": ["weft_llm_waiting"],
        "decode": ["weft_llm_kv_cache_usage_ratio", "weft_llm_waiting"],
    }
    adapter = yaml.safe_load((FOLDER / "components/hpa/prometheus-adapter.yaml").read_text())["rules"]["custom"]
    served = {rule["seriesQuery"].partition("{")[0] for rule in adapter}
    assert {name for names in scaled.values() for name in names} <= served & ours
    for one in (one for one in manifests if one["kind"] == "ScaledObject"):
        name = one["metadata"]["name"]
        assert one["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["name"] == name
        queries = [trigger["metadata"]["query"] for trigger in one["spec"]["triggers"]]
        assert [any(metric in query for query in queries) for metric in scaled[name]] == [True] * len(scaled[name])
        assert all(f'service="{name}"' in query for query in queries)
    roles = [one for one in manifests if one["kind"] == "Deployment" and one["metadata"]["name"] in scaled]
    assert all("replicas" not in one["spec"] for one in roles), "an autoscaler owns the number"


def test_an_endpoint_picker_finds_what_it_reads_at_the_port_of_the_pool(tmp_path: Path) -> None:
    """The gateway's metrics with the models', from the model's port in the same pod, under vLLM's names."""
    manifests = rendered(tmp_path, "inference-pool")
    (pool,) = (one["spec"] for one in manifests if one["kind"] == "InferencePool")
    (deployment,) = (one for one in manifests if one["metadata"]["name"] == "inference" and one["kind"] == "Deployment")
    (template,) = pods_of(deployment)
    assert matches(pool["selector"], template["metadata"]["labels"])
    assert template["metadata"]["labels"]["llm-d.ai/engine-type"] == "vllm"
    containers = {one["name"]: one for one in template["spec"]["containers"]}
    options = {name: options_of(one, tmp_path) for name, one in containers.items()}
    assert [{"number": options["gateway"].port}] == pool["targetPorts"]
    assert options["gateway"].probes
    (source,) = options["gateway"].metrics_from
    assert source.url == f"http://127.0.0.1:{options['model'].metrics_port}/metrics"
    assert options["gateway"].router == "127.0.0.1:8001"
    assert options["router"].target == [("model", f"127.0.0.1:{options['model'].grpc_port}")]
