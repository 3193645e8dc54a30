"""A placement as manifests of Kubernetes: a pod for each device or slice, which serves the models placed there.

Kubernetes' scheduler knows no memory of a GPU, so models that share one share a pod. Pods alike are one Deployment.
Where spread replicas would not end where they belong by a ``topologySpreadConstraint`` alone, the pods of a failure
domain are a Deployment of their own with the domain in its ``nodeSelector``.

Nodes need the labels ``topology.kubernetes.io/zone`` (the failure domain) and ``weft/device-class``; slices need
NVIDIA's device plugin with the strategy ``mixed``, which names them ``nvidia.com/mig-1g.10gb``
(https://docs.nvidia.com/datacenter/cloud-native/kubernetes/latest/index.html), and are made by its MIG manager from the
ConfigMap (https://github.com/NVIDIA/mig-parted).
"""

import copy
import hashlib
import json
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import Bin, Solution

Manifest = dict[str, Any]
ZONE = "topology.kubernetes.io/zone"
HOSTNAME = "kubernetes.io/hostname"
DEVICE_CLASS = "weft/device-class"
_TEMPLATE = Path("deploy/kubernetes/base/model.yaml")
_PORT = 8021
_MIB = 1 << 20


class _PodKind(NamedTuple):
    """What makes two pods alike: the class of device, the MIG profile, the models with their numbers of replicas."""

    device_class: str
    profile: str
    is_gpu: bool
    models: tuple[tuple[str, int], ...]


def kubernetes_text(problem: Problem, solution: Solution, image: str = "weft-model") -> str:
    """The manifests as one ``List`` in JSON, which ``kubectl apply -f`` takes."""
    return (
        json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(problem, solution, image)}, indent=2) + "\n"
    )


def manifests(problem: Problem, solution: Solution, image: str = "weft-model") -> list[Manifest]:
    """Deployments, a headless Service for each model, and the partitions of GPUs that have slices.

    Args:
        problem: What was placed.
        solution: Where.
        image: Of the model service.

    Raises:
        KeyError: The placement is of another problem.
    """
    devices = {device.name: device for device in problem.devices}
    pods: dict[_PodKind, list[Device]] = defaultdict(list)
    held: dict[Bin, Counter[str]] = defaultdict(Counter)
    for name, _, bin in solution.assignments:
        held[bin][name] += 1
    for bin, models in sorted(held.items()):
        device = devices[bin.device]
        kind = _PodKind(device.device_class, bin.profile, device.index is not None, tuple(sorted(models.items())))
        pods[kind].append(device)
    items: list[Manifest] = []
    for kind, on in pods.items():
        for domain, number in _parts(problem, kind, on, pods):
            items.append(_deployment(problem, kind, domain, number, image))
    items += [_service(name) for name in sorted({name for kind in pods for name, _ in kind.models})]
    if partitions := _partitions(problem, solution):
        items.append(partitions)
    return items


def _parts(
    problem: Problem, kind: _PodKind, on: list[Device], pods: dict[_PodKind, list[Device]]
) -> list[tuple[str, int]]:
    """The failure domains ("": any that balances) that a kind of pod is divided into, with the numbers of pods."""
    spread = [workload for workload in problem.workloads if workload.spread and workload.name in dict(kind.models)]
    domains = Counter(device.in_domain for device in on)
    if not spread:
        return [("", len(on))]
    is_alone = all(sum(w.name in dict(other.models) for other in pods) == 1 for w in spread)
    counts = [domains[domain] for domain in problem.domains_of(spread[0])]
    same = all(problem.domains_of(w) == problem.domains_of(spread[0]) for w in spread)
    if is_alone and same and max(counts) - min(counts) <= 1:
        return [("", len(on))]
    return sorted(domains.items())


def _deployment(problem: Problem, kind: _PodKind, domain: str, number: int, image: str) -> Manifest:
    workloads = {workload.name: workload for workload in problem.workloads}
    models = [(workloads[name], replicas) for name, replicas in kind.models]
    digest = hashlib.sha256(repr((kind, domain)).encode()).hexdigest()[:8]
    name = f"{_slug(kind.models[0][0])}-{digest}"
    labels = {"app.kubernetes.io/name": name} | {_label(workload.name): "true" for workload, _ in models}
    deployment = copy.deepcopy(_template())
    deployment["metadata"] = {"name": name, "labels": labels}
    spec = deployment["spec"]
    spec |= {"replicas": number, "selector": {"matchLabels": {"app.kubernetes.io/name": name}}}
    spec["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}  # a device is not there twice
    spec["template"]["metadata"]["labels"] = labels
    pod = spec["template"]["spec"]
    pod["topologySpreadConstraints"] = _spreading(problem, models, name, domain)
    selector = {DEVICE_CLASS: kind.device_class} if len({each.device_class for each in problem.devices}) > 1 else {}
    if domain:
        selector[_topology_key(problem)] = domain
    if selector:
        pod["nodeSelector"] = selector
    if kind.is_gpu:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if terms := _apart(models, problem):
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    container = pod["containers"][0]
    loaded = [f"--load-model={workload.name}" for workload, _ in models]
    container["args"] = ["--model-control-mode=explicit", *loaded, *container["args"]]
    container |= {"image": image, "resources": resources(kind.is_gpu, kind.profile, models)}
    return deployment


@cache
def _template() -> Manifest:
    """The Deployment of the model service as ``deploy/`` has it, which the wheel holds a copy of."""
    path = Path(__file__).with_name(_TEMPLATE.name)
    text = (path if path.is_file() else Path(__file__).parents[4] / _TEMPLATE).read_text(encoding="utf-8")
    found: Manifest = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
    return found


def resources(is_gpu: bool, profile: str, models: list[tuple[Workload, int]]) -> Manifest:
    """Requests and limits of a pod that holds replicas of these workloads on a whole device (profile "") or a slice."""
    cpus = sum(workload.cpus * number for workload, number in models)
    on_device = 0 if is_gpu else sum(workload.memory_bytes * number for workload, number in models)
    num_mib = -(-(on_device + sum(workload.host_memory_bytes * number for workload, number in models)) // _MIB)
    limits: dict[str, str | int] = {"memory": f"{num_mib}Mi"}
    if is_gpu:
        limits[f"nvidia.com/mig-{profile}" if profile else "nvidia.com/gpu"] = 1
    return {"requests": {"cpu": f"{max(round(cpus * 1000), 1)}m", **limits}, "limits": limits}


def _spreading(problem: Problem, models: list[tuple[Workload, int]], name: str, domain: str) -> list[Manifest]:
    match = {"matchLabels": {"app.kubernetes.io/name": name}}
    hosts = {"maxSkew": 1, "topologyKey": HOSTNAME, "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": match}
    if domain or not any(workload.spread for workload, _ in models):
        return [hosts]
    key = _topology_key(problem)
    zones = {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": match}
    return [zones] if key == HOSTNAME else [zones, hosts]


def _topology_key(problem: Problem) -> str:
    """The label of nodes that tells failure domains apart: that of zones, or of hosts if each is its own domain."""
    return ZONE if any(device.in_domain != device.on_host for device in problem.devices) else HOSTNAME


def _apart(models: list[tuple[Workload, int]], problem: Problem) -> list[Manifest]:
    here = {workload.name for workload, _ in models}
    others = {other for workload, _ in models for other in workload.apart_from}
    others |= {workload.name for workload in problem.workloads if workload.apart_from & here}
    return [
        {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": {_label(other): "true"}}} for other in sorted(others)
    ]


def _service(model: str) -> Manifest:
    """Resolves to every pod that serves a model."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"model-{_slug(model)}"},
        "spec": {
            "clusterIP": "None",
            "selector": {_label(model): "true"},
            "ports": [{"name": "grpc", "port": _PORT, "targetPort": "grpc"}],
        },
    }


def _partitions(problem: Problem, solution: Solution) -> Manifest | None:
    """How the MIG manager partitions GPUs, a configuration for each host; None: no GPU has slices."""
    on_host: dict[str, list[Manifest]] = defaultdict(list)
    for device in problem.devices:
        if slices := solution.slices(device.name):
            counts = Counter(bin.profile for bin in slices)
            entry = {"devices": [device.index or 0], "mig-enabled": True, "mig-devices": dict(sorted(counts.items()))}
            on_host[device.on_host].append(entry)
    if not on_host:
        return None
    for device in problem.devices:
        if device.on_host in on_host and not solution.slices(device.name) and device.index is not None:
            on_host[device.on_host].append({"devices": [device.index], "mig-enabled": False})
    config = {"version": "v1", "mig-configs": {_slug(host): entries for host, entries in sorted(on_host.items())}}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "weft-mig-parted-config"},
        "data": {"config.yaml": json.dumps(config, indent=2)},
    }


def _label(model: str) -> str:
    return f"weft/model-{_slug(model)}"


def _slug(name: str) -> str:
    """A name as Kubernetes allows it in labels and names; with a digest where it had to be changed."""
    slug = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-") or "x"
    return slug if slug == name else f"{slug[:32].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
