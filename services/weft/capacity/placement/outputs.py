"""Outputs of a placement: JSON with its problem, ``instance_group`` of ``config.pbtxt``, Kubernetes manifests.

Kubernetes' scheduler does not know the memory of a GPU, so models that share one share a pod: there is a pod for each
device or slice, and equal pods are one Deployment. If a ``topologySpreadConstraint`` alone would not spread replicas as
planned, the pods of a failure domain are a Deployment of their own with the domain in its ``nodeSelector``.

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
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from google.protobuf import text_format

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft.capacity.placement.solution import Assignment, Bin, Solution, Unplaced
from weft.jobs.atomic_files import replace_file
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: Of the format of saved plans; one that is not known is refused.
VERSION = 1
#: A larger file is no plan of ours.
_MAX_BYTES = 64 << 20

Manifest = dict[str, Any]
_ZONE = "topology.kubernetes.io/zone"
_HOSTNAME = "kubernetes.io/hostname"
_DEVICE_CLASS = "weft/device-class"
_TEMPLATE = Path("deploy/kubernetes/base/model.yaml")
_PORT = 8021
_MIB = 1 << 20


def save(path: Path, problem: Problem, solution: Solution) -> None:
    """Write a placement and its problem to a file, atomically. Raises OSError."""
    replace_file(path, (json.dumps(to_json(problem, solution), indent=1) + "\n").encode())


def load(path: Path) -> tuple[Problem, Solution]:
    """Read a file of ``save``.

    Raises:
        InvalidArgumentError: The file is invalid; the message says why, and what to do.
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise InvalidArgumentError(
            f"'{path}' is larger than {_MAX_BYTES} bytes, so it is no plan; name what --save wrote"
        )
    try:
        return from_json(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"'{path}' is not a saved plan ({type(error).__name__}: {error}); name a file that 'weft plan --save' wrote"
        ) from None
    except InvalidArgumentError as error:
        raise error.with_message(f"'{path}': {error.message}") from None


def to_json(problem: Problem, solution: Solution) -> dict[str, Any]:
    """Plain values for ``json``."""
    workloads = [
        asdict(workload) | {"load": dict(workload.load), "apart_from": sorted(workload.apart_from)}
        for workload in problem.workloads
    ]
    return {
        "version": VERSION,
        "max_load": problem.max_load,
        "workloads": workloads,
        "devices": [asdict(device) for device in problem.devices],
        "assignments": [[name, replica, list(bin)] for name, replica, bin in solution.assignments],
        "unplaced": [list(entry) for entry in solution.unplaced],
        "method": "cp-sat",
        "is_optimal": solution.is_optimal,
        "cost_bound": solution.cost_bound,
        "notes": list(solution.notes),
    }


def from_json(values: Any) -> tuple[Problem, Solution]:
    """Inverse of ``to_json``. Raises InvalidArgumentError, or a Python error, for other values."""
    if (version := values["version"]) != VERSION:
        raise InvalidArgumentError(f"its version is {version!r}; this program reads {VERSION}; save the plan again")
    workloads = (Workload(**(entry | {"apart_from": frozenset(entry["apart_from"])})) for entry in values["workloads"])
    devices = []
    for entry in values["devices"]:
        profiles = (MigProfile(**(profile | {"starts": tuple(profile["starts"])})) for profile in entry["mig"])
        devices.append(Device(**(entry | {"mig": tuple(profiles)})))
    problem = Problem(tuple(workloads), tuple(devices), values["max_load"])
    solution = Solution(
        tuple(Assignment(str(name), int(replica), Bin(*bin)) for name, replica, bin in values["assignments"]),
        tuple(Unplaced(*entry) for entry in values["unplaced"]),
        values["is_optimal"],
        values["cost_bound"],
        tuple(values["notes"]),
    )
    return problem, solution


def instance_groups(problem: Problem, solution: Solution) -> dict[tuple[str, str], str]:
    """The text of ``instance_group`` by host and model.

    ``count`` is the number of instances on each of ``gpus``. A process sees one MIG slice, as GPU 0, so a host with
    slices runs a service for each; equal groups appear once.
    """
    devices = {device.name: device for device in problem.devices}
    held: dict[tuple[str, str], Counter[Bin]] = defaultdict(Counter)
    num_instances = {workload.name: workload.num_instances for workload in problem.workloads}
    for name, _, bin in solution.assignments:
        held[devices[bin.device].on_host, name][bin] += num_instances[name]
    texts = {}
    for key, instances in sorted(held.items()):
        gpus: dict[int, set[int]] = defaultdict(set)  # instances on each -> GPUs
        num_on_cpu = 0
        for bin, number in instances.items():
            index = devices[bin.device].index
            if index is None:
                num_on_cpu += number
            else:
                gpus[number].add(0 if bin.profile else index)
        config = ModelConfig()
        for number in sorted(gpus):
            config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, count=number, gpus=sorted(gpus[number]))
        if num_on_cpu:
            config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=num_on_cpu)
        texts[key] = text_format.MessageToString(config)
    return texts


class _PodKind(NamedTuple):
    """Pods of one kind have the same class of device, MIG profile, and models with numbers of replicas."""

    device_class: str
    profile: str
    is_gpu: bool
    models: tuple[tuple[str, int], ...]


def kubernetes_text(problem: Problem, solution: Solution) -> str:
    """The manifests as one ``List`` in JSON, for ``kubectl apply -f``."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests(problem, solution)}, indent=2) + "\n"


def manifests(problem: Problem, solution: Solution) -> list[Manifest]:
    """Deployments, a headless Service for each model, and the partitions of GPUs that have slices."""
    devices = {device.name: device for device in problem.devices}
    pods: dict[_PodKind, list[Device]] = defaultdict(list)
    held: dict[Bin, Counter[str]] = defaultdict(Counter)
    for name, _, bin in solution.assignments:
        held[bin][name] += 1
    for bin, models in sorted(held.items()):
        device = devices[bin.device]
        kind = _PodKind(device.device_class, bin.profile, device.index is not None, tuple(sorted(models.items())))
        pods[kind].append(device)
    items = [
        _deployment(problem, kind, domain, number)
        for kind, on in pods.items()
        for domain, number in _parts(problem, kind, on, pods)
    ]
    items += [_service(name) for name in sorted({name for kind in pods for name, _ in kind.models})]
    return [*items, *_partitions(problem, solution)]


def _parts(
    problem: Problem, kind: _PodKind, on: list[Device], pods: dict[_PodKind, list[Device]]
) -> list[tuple[str, int]]:
    """The failure domains ("": any that balances) that a kind of pod is divided into, with the numbers of pods."""
    spread = [workload for workload in problem.workloads if workload.spread and workload.name in dict(kind.models)]
    if not spread:
        return [("", len(on))]
    domains = Counter(device.in_domain for device in on)
    is_alone = all(sum(w.name in dict(other.models) for other in pods) == 1 for w in spread)
    counts = [domains[domain] for domain in problem.domains_of(spread[0])]
    same = all(problem.domains_of(w) == problem.domains_of(spread[0]) for w in spread)
    if is_alone and same and max(counts) - min(counts) <= 1:
        return [("", len(on))]
    return sorted(domains.items())


def _deployment(problem: Problem, kind: _PodKind, domain: str, number: int) -> Manifest:
    workloads = {workload.name: workload for workload in problem.workloads}
    models = [(workloads[name], replicas) for name, replicas in kind.models]
    digest = hashlib.sha256(repr((kind, domain)).encode()).hexdigest()[:8]
    name = f"{_slug(kind.models[0][0])}-{digest}"
    match = {"matchLabels": {"app.kubernetes.io/name": name}}
    labels = match["matchLabels"] | {_label(workload.name): "true" for workload, _ in models}
    #: The label of nodes that tells failure domains apart: that of hosts if each is its own domain.
    topology = _ZONE if any(device.in_domain != device.on_host for device in problem.devices) else _HOSTNAME
    deployment = copy.deepcopy(_template())
    deployment["metadata"] = {"name": name, "labels": labels}
    spec = deployment["spec"]
    spec |= {"replicas": number, "selector": match}
    spec["strategy"]["rollingUpdate"] = {"maxSurge": 0, "maxUnavailable": 1}  # a device is not there twice
    spec["template"]["metadata"]["labels"] = labels
    pod = spec["template"]["spec"]
    spreading = {_HOSTNAME: "ScheduleAnyway"}
    if not domain and any(workload.spread for workload, _ in models):
        spreading = {topology: "DoNotSchedule"} | {k: v for k, v in spreading.items() if k != topology}
    pod["topologySpreadConstraints"] = [
        {"maxSkew": 1, "topologyKey": key, "whenUnsatisfiable": otherwise, "labelSelector": match}
        for key, otherwise in spreading.items()
    ]
    selector = {_DEVICE_CLASS: kind.device_class} if len({each.device_class for each in problem.devices}) > 1 else {}
    if domain:
        selector[topology] = domain
    if selector:
        pod["nodeSelector"] = selector
    if kind.is_gpu:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    here = {workload.name for workload, _ in models}
    others = {other for workload, _ in models for other in workload.apart_from}
    others |= {workload.name for workload in problem.workloads if workload.apart_from & here}
    if others:
        terms = [
            {"topologyKey": _HOSTNAME, "labelSelector": {"matchLabels": {_label(other): "true"}}}
            for other in sorted(others)
        ]
        pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    container = pod["containers"][0]
    loaded = [f"--load-model={workload.name}" for workload, _ in models]
    container["args"] = ["--model-control-mode=explicit", *loaded, *container["args"]]
    container |= {"image": "weft-model", "resources": _resources(kind, models)}
    return deployment


@cache
def _template() -> Manifest:
    """The model service's Deployment as in ``deploy/``, copied into the wheel."""
    path = Path(__file__).with_name(_TEMPLATE.name)
    text = (path if path.is_file() else Path(__file__).parents[4] / _TEMPLATE).read_text(encoding="utf-8")
    found: Manifest = next(each for each in yaml.safe_load_all(text) if each["kind"] == "Deployment")
    return found


def _resources(kind: _PodKind, models: Sequence[tuple[Workload, int]]) -> Manifest:
    cpus = sum(workload.cpus * number for workload, number in models)
    on_device = 0 if kind.is_gpu else sum(workload.memory_bytes * number for workload, number in models)
    num_mib = -(-(on_device + sum(workload.host_memory_bytes * number for workload, number in models)) // _MIB)
    limits: dict[str, str | int] = {"memory": f"{num_mib}Mi"}
    if kind.is_gpu:
        limits[f"nvidia.com/mig-{kind.profile}" if kind.profile else "nvidia.com/gpu"] = 1
    return {"requests": {"cpu": f"{max(round(cpus * 1000), 1)}m", **limits}, "limits": limits}


def _service(model: str) -> Manifest:
    """A Service that resolves to every pod with the model."""
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


def _partitions(problem: Problem, solution: Solution) -> list[Manifest]:
    """MIG manager configuration for each host; [] if no GPU has slices."""
    on_host: dict[str, list[Manifest]] = defaultdict(list)
    for device in problem.devices:
        if slices := solution.slices(device.name):
            counts = Counter(bin.profile for bin in slices)
            entry = {"devices": [device.index or 0], "mig-enabled": True, "mig-devices": dict(sorted(counts.items()))}
            on_host[device.on_host].append(entry)
    if not on_host:
        return []
    for device in problem.devices:
        if device.on_host in on_host and not solution.slices(device.name) and device.index is not None:
            on_host[device.on_host].append({"devices": [device.index], "mig-enabled": False})
    config = {"version": "v1", "mig-configs": {_slug(host): entries for host, entries in sorted(on_host.items())}}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "weft-mig-parted-config"},
            "data": {"config.yaml": json.dumps(config, indent=2)},
        }
    ]


def _label(model: str) -> str:
    return f"weft/model-{_slug(model)}"


def _slug(name: str) -> str:
    """A valid Kubernetes name or label; with a digest if it had to be changed."""
    slug = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:40].strip("-") or "x"
    return slug if slug == name else f"{slug[:32].strip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
