"""A placement as configuration, manifests and files, read by those that take them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from hypothesis import given, settings
from tests.unit.capacity.placement.problems import GIB, H100, gpus, problems

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt import parse
from weft.capacity.placement import Device, Problem, Workload, place
from weft.capacity.placement.outputs import from_json, instance_groups, kubernetes_text, load, manifests, save, to_json
from weft.serving.config.checks import ConfigReport
from weft.serving.config.placement import place_instances
from weft_protos.model_config_pb2 import ModelConfig

VERSIONS = ("1.32", "1.34")


def of_kind(items: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Manifests of one kind."""
    return [item for item in items if item["kind"] == kind]


@settings(max_examples=12, deadline=None)
@given(problems())
def test_instance_groups_are_those_of_a_configuration(problem: Problem) -> None:
    """The model service's own parser makes as many instances of them as replicas were placed on the host."""
    solution = place(problem, time_limit_s=0.1)
    host_of = {device.name: device.on_host for device in problem.devices}
    placed = Counter((host_of[e.bin.device], e.workload) for e in solution.assignments if not e.bin.profile)
    has_slices = {(host_of[e.bin.device], e.workload) for e in solution.assignments if e.bin.profile}
    texts = instance_groups(problem, solution)
    assert {(host_of[entry.bin.device], entry.workload) for entry in solution.assignments} == texts.keys()
    for key, text in texts.items():
        config = ModelConfig()
        parse(text, config, file="config.pbtxt")
        report = ConfigReport("config.pbtxt")
        instances = place_instances(config, num_gpus=8, can_use_gpu=True, report=report)
        assert key in has_slices or placed[key] == len(instances)


def test_an_instance_group_names_count_and_gpus() -> None:
    """Two replicas on GPU 0 and one on GPU 1 are two groups, on a CPU all instances are one of KIND_CPU."""
    problem = Problem((Workload("m", 30 * GIB, {H100: 0.3}, 3),), gpus(2))
    assert (
        "instance_group {\n  count: 1\n  gpus: 1\n  kind: KIND_GPU\n}\n"
        "instance_group {\n  count: 2\n  gpus: 0\n  kind: KIND_GPU\n}\n"
    ) == instance_groups(problem, place(problem))["h0", "m"]
    problem = Problem((Workload("m", GIB, {"cpu": 0.3}, 3, num_instances=2),), (Device("c", "cpu", 64 * GIB),))
    text = instance_groups(problem, place(problem))["c", "m"]
    assert "instance_group {\n  count: 6\n  kind: KIND_CPU\n}\n" == text


@settings(max_examples=8, deadline=None)
@given(problems())
def test_manifests_are_valid_and_run_what_was_placed(problem: Problem) -> None:
    """Kubernetes' schemas take them; there is a pod for each device and slice in use, with the models placed there."""
    solution = place(problem, time_limit_s=0.1)
    items = json.loads(kubernetes_text(problem, solution))["items"]
    for item in items:
        for version in VERSIONS:
            kubernetes_validate.validate(item, version, strict=True)
    deployments = of_kind(items, "Deployment")
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    assert len({entry.bin for entry in solution.assignments}) == sum(d["spec"]["replicas"] for d in deployments)
    loaded: Counter[str] = Counter()
    for deployment in deployments:
        for argument in deployment["spec"]["template"]["spec"]["containers"][0]["args"]:
            if argument.startswith("--load-model="):
                loaded[argument.partition("=")[2]] += deployment["spec"]["replicas"]
    assert Counter(name for name, _ in {(e.workload, e.bin) for e in solution.assignments}) == loaded


def test_resources_are_what_is_placed() -> None:
    """A pod asks for its cores, its memory, and one GPU or one slice of the profile that was chosen."""
    workloads = tuple(Workload(f"m{i}", 9 * GIB, {H100: 0.1}, cpus=0.5, host_memory_bytes=2 * GIB) for i in range(2))
    problem = Problem(workloads, gpus(1, with_mig=True, max_models=1))
    items = manifests(problem, place(problem))
    (one, other) = of_kind(items, "Deployment")
    for deployment in (one, other):
        assert {
            "requests": {"cpu": "500m", "memory": "2048Mi", "nvidia.com/mig-1g.10gb": 1},
            "limits": {"memory": "2048Mi", "nvidia.com/mig-1g.10gb": 1},
        } == deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    (partitions,) = of_kind(items, "ConfigMap")
    config = json.loads(partitions["data"]["config.yaml"])
    expected = [{"devices": [0], "mig-enabled": True, "mig-devices": {"1g.10gb": 2}}]
    assert {"h0": expected} == config["mig-configs"]
    problem = Problem((Workload("m", GIB, {"cpu": 0.3}, 2, cpus=2),), (Device("c", "cpu", 64 * GIB),))
    (deployment,) = of_kind(manifests(problem, place(problem)), "Deployment")
    resources = deployment["spec"]["template"]["spec"]["containers"][0]["resources"]
    assert {"requests": {"cpu": "4000m", "memory": "4096Mi"}, "limits": {"memory": "4096Mi"}} == resources


def test_spread_replicas_are_spread_by_kubernetes() -> None:
    """Alike pods of a spread model have a constraint over zones; where pods differ, each zone has its Deployment."""
    spread = Workload("m", 50 * GIB, {"*": 0.6}, 3, spread=True)
    problem = Problem((spread,), gpus(6))
    (deployment,) = of_kind(manifests(problem, place(problem)), "Deployment")
    constraint = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"][0]
    assert ("topology.kubernetes.io/zone", 1, "DoNotSchedule") == (
        constraint["topologyKey"],
        constraint["maxSkew"],
        constraint["whenUnsatisfiable"],
    )
    problem = Problem((spread, Workload("n", 20 * GIB, {"*": 0.2})), gpus(6))
    deployments = of_kind(manifests(problem, place(problem)), "Deployment")
    zones = [d["spec"]["template"]["spec"]["nodeSelector"]["topology.kubernetes.io/zone"] for d in deployments]
    assert ["z0", "z1", "z2"] == sorted(zones)


def test_models_apart_repel_each_other() -> None:
    """A pod refuses hosts with a model that is to be apart from its own, whichever of the two says so."""
    problem = Problem(
        (Workload("a", GIB, {"*": 0.1}, apart_from=frozenset({"b"})), Workload("b", GIB, {"*": 0.1})), gpus(4)
    )
    for deployment in of_kind(manifests(problem, place(problem)), "Deployment"):
        spec = deployment["spec"]["template"]
        (term,) = spec["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (label,) = term["labelSelector"]["matchLabels"]
        assert label not in spec["metadata"]["labels"]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "a" * 200, "Ä", "a.b_c", "-"])
def test_any_name_of_a_model_is_a_label(name: str) -> None:
    """Names that Kubernetes does not take are changed to such that it does, and stay different."""
    problem = Problem((Workload(name, GIB, {"*": 0.1}), Workload(name + "2", GIB, {"*": 0.9})), gpus(2))
    items = manifests(problem, place(problem))
    for item in items:
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)
    assert 2 == len({item["metadata"]["name"] for item in of_kind(items, "Service")})
    for item in of_kind(items, "Deployment"):
        for key in item["metadata"]["labels"]:
            assert len(key.partition("/")[2]) <= 63
        assert len(item["metadata"]["name"]) <= 63


@settings(max_examples=12, deadline=None)
@given(problems())
def test_a_plan_is_read_as_it_was_written(problem: Problem) -> None:
    """Problem and placement come back the same from JSON."""
    solution = place(problem, time_limit_s=0.1)
    assert (problem, solution) == from_json(json.loads(json.dumps(to_json(problem, solution))))


def test_a_saved_plan_with_a_wrong_value_is_refused(tmp_path: Path) -> None:
    """Values that make no sense are named as in any other problem."""
    path = tmp_path / "plan.json"
    problem = Problem((Workload("m", GIB, {"*": 0.1}),), gpus(1))
    save(path, problem, place(problem))
    path.write_text(path.read_text().replace('"num_replicas": 1', '"num_replicas": -1'))
    with pytest.raises(InvalidArgumentError, match=r"plan\.json': workload 'm': num_replicas is -1"):
        load(path)
