"""The scheduler of Kubernetes, simulated: what it takes of two nodes is what its plugins say."""

import random

from benchmarks.kube_scheduler import schedule

from weft.capacity.placement import Device, Problem, Workload
from weft.capacity.placement.solution import faults

GIB = 1 << 30


def nodes(number: int, *, per_zone: int = 1) -> tuple[Device, ...]:
    """Alike devices, each a node."""
    return tuple(Device(f"d{i}", "gpu", 80 * GIB, f"h{i}", f"z{i // per_zone}") for i in range(number))


def test_replicas_go_where_most_is_free() -> None:
    """LeastAllocated takes an empty node for each of three replicas; MostAllocated puts them together."""
    problem = Problem((Workload("m", 10 * GIB, {"*": 0.1}, 3),), nodes(3))
    assert 3 == len(schedule(problem, random.Random(1)).devices)
    models = tuple(Workload(f"m{i}", 10 * GIB, {"*": 0.125}) for i in range(3))
    assert 1 == len(schedule(Problem(models, nodes(3)), random.Random(1), packs=True).devices)


def test_the_balanced_node_is_taken() -> None:
    """Of two nodes with as much free on average, a pod goes where memory and compute are then used alike."""
    memory, compute = Workload("a", 40 * GIB, {"x": 0.0, "gpu": 0.0}), Workload("b", 0, {"y": 0.5, "gpu": 0.5})
    devices = (Device("x", "x", 80 * GIB, "hx", "z"), Device("y", "y", 80 * GIB, "hy", "z"))
    model = Workload("c", 40 * GIB, {"*": 0.0})
    problem = Problem((memory, compute, model), devices)
    last = [schedule(problem, random.Random(seed)).assignments[-1] for seed in range(20)]
    assert {"y"} == {entry.bin.device for entry in last if entry.workload == "c"}


def test_spread_constraints_filter() -> None:
    """Five replicas with maxSkew 1 in three zones never differ by more, whatever the order; the rules all hold."""
    models = (Workload("m", GIB, {"*": 0.1}, 5, spread=True), Workload("n", 70 * GIB, {"*": 0.8}, 3))
    problem = Problem(models, nodes(6, per_zone=2))
    for seed in range(20):
        assert [] == faults(problem, schedule(problem, random.Random(seed)))


def test_what_fits_nowhere_stays_pending() -> None:
    """It is told, and keeps nothing else from its place."""
    problem = Problem((Workload("large", 90 * GIB, {"*": 0.1}, 2), Workload("m", GIB, {"*": 0.1})), nodes(2))
    solution = schedule(problem, random.Random(1))
    assert [("large", 2)] == [entry[:2] for entry in solution.unplaced]
    assert ["m"] == [entry.workload for entry in solution.assignments]
