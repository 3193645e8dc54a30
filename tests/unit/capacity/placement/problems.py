"""Problems to place, drawn by Hypothesis, and small ones by hand."""

from itertools import product
from typing import Any

from hypothesis import strategies as st

from weft.capacity.placement import Assignment, Bin, Device, Problem, Solution, Unplaced, Workload
from weft.capacity.placement.problem import known_mig
from weft.capacity.placement.solution import cost_per_hour, faults

GIB = 1 << 30
H100 = "H100-80GB"


def gpus(number: int, *, per_host: int = 2, with_mig: bool = False, **fields: Any) -> tuple[Device, ...]:
    """H100s ``d0``, ``d1`` ..., each host a zone of its own."""
    mig = known_mig()[H100] if with_mig else ()
    return tuple(
        Device(f"d{i}", H100, 80 * GIB, f"h{i // per_host}", f"z{i // per_host}", i % per_host, mig=mig, **fields)
        for i in range(number)
    )


@st.composite
def problems(draw: st.DrawFn, max_workloads: int = 6, max_devices: int = 6, max_replicas: int = 4) -> Problem:
    """Any valid problem: several classes, hosts and zones, MIG, limits of sharing, rules that may not be kept."""
    load = st.dictionaries(st.sampled_from([H100, "A30-24GB", "cpu", "*"]), st.floats(0, 1.2), min_size=1)
    workloads = [
        Workload(
            f"m{i}",
            draw(st.integers(0, 90)) * GIB,
            draw(load),
            draw(st.integers(0, max_replicas)),
            draw(st.booleans()),
        )
        for i in range(draw(st.integers(1, max_workloads)))
    ]
    devices = []
    for i in range(draw(st.integers(1, max_devices))):
        device_class, memory_gib = draw(st.sampled_from([(H100, 80), ("A30-24GB", 24), ("cpu", 64)]))
        host = draw(st.integers(0, 3))
        has_mig = draw(st.booleans()) and device_class in known_mig()
        devices.append(
            Device(
                f"d{i}",
                device_class,
                memory_gib * GIB,
                f"h{host}",
                f"z{host % 2}",
                None if device_class == "cpu" else i,
                draw(st.integers(1, 4)),
                draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
                known_mig()[device_class] if has_mig else (),
            )
        )
    return Problem(tuple(workloads), tuple(devices), draw(st.sampled_from([0.8, 1.0])))


def by_brute_force(problem: Problem) -> tuple[float, float] | None:
    """Least cost and number of devices of a placement of all replicas, by trying every one; None: there is none."""
    bins = [Bin(device.name) for device in problem.devices]
    bins += [Bin(d.name, profile.name, start) for d in problem.devices for profile in d.mig for start in profile.starts]
    replicas = [(workload.name, n) for workload in problem.workloads for n in range(workload.num_replicas)]
    found = []
    for places in product(bins, repeat=len(replicas)):
        solution = Solution(tuple(Assignment(*replica, bin) for replica, bin in zip(replicas, places, strict=True)))
        if not faults(problem, solution):
            found.append((cost_per_hour(problem, solution), len(solution.devices)))
    return min(found, default=None)


def num_unplaced(solution: Solution) -> int:
    """Replicas without a place."""
    return sum(entry.num_replicas for entry in solution.unplaced)


__all__ = ["GIB", "H100", "Unplaced", "by_brute_force", "gpus", "num_unplaced", "problems"]
