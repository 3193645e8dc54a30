"""The default scheduler of Kubernetes, as far as it decides where models go.

Pods come one after another and stay where they are put. A node is filtered by requests, labels and
``topologySpreadConstraints``; of those that are left, the one with the highest score is taken, by the default plugins
and weights: NodeResourcesFit (LeastAllocated, 1), NodeResourcesBalancedAllocation (1), PodTopologySpread (2;
constraints of the cluster: zone, maxSkew 5, and hostname, maxSkew 3). Where it differs, it is in the scheduler's
favour: a device is a node, its memory and compute are requests that the scheduler knows, and a replica requests on each
class of device what it needs there. Sources: pkg/scheduler/framework/plugins/{noderesources,podtopologyspread} and
pkg/scheduler/apis/config/v1/default_plugins.go of https://github.com/kubernetes/kubernetes.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from weft.capacity.placement import Assignment, Bin, Device, Problem, Solution, Unplaced, Workload
from weft.capacity.placement.solution import TOLERANCE

_MAX_SCORE = 100
_SPREAD_WEIGHT = 2
#: The constraints that a cluster has for pods without any: topology -> maxSkew.
_DEFAULT_SKEWS = {"zone": 5, "hostname": 3}


@dataclass
class _Node:
    """A device as a node: what pods on it request together."""

    device: Device
    memory_bytes: int = 0
    load: float = 0.0
    pods: Counter[str] = field(default_factory=Counter)


def schedule(problem: Problem, rng: random.Random, *, packs: bool = False) -> Solution:
    """Where the scheduler puts the replicas; deployments come in random order.

    Args:
        problem: Without MIG.
        rng: Of the order, and of choices among nodes of one score.
        packs: MostAllocated in place of the default LeastAllocated.
    """
    nodes = [_Node(device) for device in problem.devices]
    pending = [workload for workload in problem.workloads for _ in range(workload.num_replicas)]
    order = {workload.name: rng.random() for workload in problem.workloads}
    pending.sort(key=lambda workload: order[workload.name])
    placed: list[Assignment] = []
    numbers = Counter[str]()
    progress = True
    while progress and pending:  # what did not fit is tried again, since other pods change the skew
        waiting, progress = [], False
        for workload in pending:
            if node := _choose(problem, workload, nodes, rng, packs):
                node.memory_bytes += workload.memory_bytes
                node.load += workload.load_on(node.device.device_class) or 0.0
                node.pods[workload.name] += 1
                placed.append(Assignment(workload.name, numbers[workload.name], Bin(node.device.name)))
                numbers[workload.name] += 1
                progress = True
            else:
                waiting.append(workload)
        pending = waiting
    left = Counter(workload.name for workload in pending)
    return Solution(tuple(placed), tuple(Unplaced(name, number, "") for name, number in left.items()))


def _choose(
    problem: Problem, workload: Workload, nodes: Sequence[_Node], rng: random.Random, packs: bool
) -> _Node | None:
    eligible = [node for node in nodes if workload.load_on(node.device.device_class) is not None]
    fitting = [node for node in eligible if _fits(problem, workload, node)]
    zones = Counter({node.device.in_domain: 0 for node in eligible})
    for node in eligible:
        zones[node.device.in_domain] += node.pods[workload.name]
    if workload.spread and zones:
        fewest = min(zones.values())
        fitting = [node for node in fitting if zones[node.device.in_domain] + 1 - fewest <= 1]
    if not fitting:
        return None
    score = _most_allocated if packs else _least_allocated
    scores = [sum(_resource_scores(problem, workload, node, score)) for node in fitting]
    if not workload.spread:
        spreading = _spread_scores(workload, fitting, zones)
        scores = [one + _SPREAD_WEIGHT * other for one, other in zip(scores, spreading, strict=True)]
    best = max(scores)
    return rng.choice([node for node, value in zip(fitting, scores, strict=True) if value == best])


def _fits(problem: Problem, workload: Workload, node: _Node) -> bool:
    load = workload.load_on(node.device.device_class) or 0.0
    return (
        node.memory_bytes + workload.memory_bytes <= node.device.memory_bytes
        and node.load + load <= problem.max_load + TOLERANCE
        and node.pods.total() < node.device.max_models
    )


def _resource_scores(
    problem: Problem, workload: Workload, node: _Node, score: Callable[[float], int]
) -> tuple[int, int]:
    """Of NodeResourcesFit and NodeResourcesBalancedAllocation, with the pod on the node."""
    load = workload.load_on(node.device.device_class) or 0.0
    fractions = (
        min((node.load + load) / problem.max_load, 1.0),
        min((node.memory_bytes + workload.memory_bytes) / node.device.memory_bytes, 1.0),
    )
    deviation = abs(fractions[0] - fractions[1]) / 2
    return (score(fractions[0]) + score(fractions[1])) // 2, int((1 - deviation) * _MAX_SCORE)


def _least_allocated(fraction: float) -> int:
    return int((1 - fraction) * _MAX_SCORE)


def _most_allocated(fraction: float) -> int:
    return int(fraction * _MAX_SCORE)


def _spread_scores(workload: Workload, nodes: Sequence[_Node], zones: Counter[str]) -> list[int]:
    num_zones = len({node.device.in_domain for node in nodes})
    weights = {"zone": math.log(num_zones + 2), "hostname": math.log(len(nodes) + 2)}
    raw = []
    for node in nodes:
        counts = {"zone": zones[node.device.in_domain], "hostname": node.pods[workload.name]}
        raw.append(round(sum(counts[key] * weights[key] + skew - 1 for key, skew in _DEFAULT_SKEWS.items())))
    highest, lowest = max(raw), min(raw)
    return [_MAX_SCORE * (highest + lowest - value) // highest if highest else _MAX_SCORE for value in raw]
