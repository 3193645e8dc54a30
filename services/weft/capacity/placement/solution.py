"""Placements: where each replica goes, whether that is allowed, and what it uses and costs."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from weft.capacity.placement.problem import Device, Problem, Workload

#: Shares of compute are compared with this slack: they are sums of rounded estimates.
TOLERANCE = 1e-4


class Bin(NamedTuple):
    """A holder of replicas: a device, or the MIG slice of a profile ("": the whole device) from a memory slice on."""

    device: str
    profile: str = ""
    start: int = 0

    def __str__(self) -> str:
        return f"{self.device}/{self.profile}@{self.start}" if self.profile else self.device


class Assignment(NamedTuple):
    """A replica (counted from 0) and its holder."""

    workload: str
    replica: int
    bin: Bin


class Unplaced(NamedTuple):
    """Replicas without a place, and why: their needs, the room left, the constraint in the way."""

    workload: str
    num_replicas: int
    why: str


@dataclass(frozen=True)
class Solution:
    """A placement.

    Attributes:
        assignments: Of all placed replicas, by workload and replica.
        is_optimal: Proved that none costs less, then moves fewer, then is balanced better.
        cost_bound: Proved lower bound of the cost per hour of placing as many replicas; 0: nothing better is known.
        notes: Remarks on how it was found.
    """

    assignments: tuple[Assignment, ...]
    unplaced: tuple[Unplaced, ...] = ()
    is_optimal: bool = False
    cost_bound: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def devices(self) -> list[str]:
        """The names of the devices in use, sorted."""
        return sorted({assignment.bin.device for assignment in self.assignments})

    def slices(self, device: str) -> list[Bin]:
        """The MIG slices of a device in use, by their start; [] for one that is used whole."""
        found = {entry.bin for entry in self.assignments if entry.bin.device == device and entry.bin.profile}
        return sorted(found, key=lambda bin: bin.start)


class BinUse(NamedTuple):
    """Use and capacity of a device or slice; loads are shares of the whole device."""

    memory_bytes: int
    load: float
    num_models: int
    capacity_bytes: int
    capacity_load: float
    max_models: int


def gib(num_bytes: int) -> str:
    """A human-readable size."""
    return f"{num_bytes / (1 << 30):.2f} GiB"


def cost_per_hour(problem: Problem, solution: Solution) -> float:
    """The cost of the devices in use."""
    used = {bin.device for bin in use_of(problem, solution)}
    return sum(device.cost_per_hour for device in problem.devices if device.name in used)


def capacity(problem: Problem, device: Device, profile: str) -> tuple[int, float]:
    """Memory in bytes and compute, as a share of the device, that a device (profile "") or a slice of it offers."""
    if not profile:
        return device.memory_bytes, problem.max_load
    found = {entry.name: entry for entry in device.mig}[profile]
    return min(found.memory_bytes, device.memory_bytes), found.compute_share * problem.max_load


def use_of(problem: Problem, solution: Solution) -> dict[Bin, BinUse]:
    """Use of each occupied device and slice."""
    workloads = {workload.name: workload for workload in problem.workloads}
    devices = problem.by_name
    held: dict[Bin, list[Workload]] = defaultdict(list)
    for name, _, bin in solution.assignments:
        for device in problem.devices_of(workloads[name], devices[bin.device]):
            held[bin._replace(device=device.name)].append(workloads[name])
    uses = {}
    for bin, replicas in held.items():
        device = devices[bin.device]
        load = sum(replica.load_on(device.device_class) or 0.0 for replica in replicas)
        memory_bytes = sum(replica.memory_bytes for replica in replicas)
        room = capacity(problem, device, bin.profile)
        uses[bin] = BinUse(memory_bytes, load, len(replicas), *room, device.max_models)
    return uses


def faults(problem: Problem, solution: Solution) -> list[str]:
    """Describe every rule of the problem that a placement breaks; [] if it is valid.

    Replicas that ``unplaced`` names are no fault; replicas that are neither placed nor named are one.
    """
    return list(_unknown(problem, solution)) or list(_broken(problem, solution))


def _unknown(problem: Problem, solution: Solution) -> Iterator[str]:
    workloads = {workload.name: workload for workload in problem.workloads}
    devices = {device.name: device for device in problem.devices}
    for name, _, bin in solution.assignments:
        if name not in workloads:
            yield f"workload '{name}' is not in the problem"
        elif bin.device not in devices:
            yield f"workload '{name}' is on device '{bin.device}', which is not there"
        elif workloads[name].load_on(devices[bin.device].device_class) is None:
            yield f"workload '{name}' may not be on '{bin.device}', of class '{devices[bin.device].device_class}'"
        elif workloads[name].num_devices > 1 and (
            bin.profile or problem.devices_of(workloads[name], devices[bin.device])[:1] != (devices[bin.device],)
        ):
            yield f"the {workloads[name].num_devices} devices of a replica of '{name}' cannot begin with '{bin}'"
        elif bin.profile and bin.start not in {p.name: p.starts for p in devices[bin.device].mig}.get(bin.profile, ()):
            yield f"device '{bin.device}' can have no MIG slice '{bin.profile}' that begins at {bin.start}"


def _broken(problem: Problem, solution: Solution) -> Iterator[str]:
    """Rules of counting, room, slices and domains, of a placement on devices that are there."""
    placed = Counter(assignment[:2] for assignment in solution.assignments)
    missing = {entry.workload: entry.num_replicas for entry in solution.unplaced}
    for (name, replica), number in placed.items():
        if number > 1:
            yield f"replica {replica} of '{name}' is in {number} places"
    for workload in problem.workloads:
        number = sum(name == workload.name for name, _ in placed) + missing.get(workload.name, 0)
        if number != workload.num_replicas:
            yield f"workload '{workload.name}' has {number} replicas; {workload.num_replicas} are wanted"
    uses = use_of(problem, solution)
    for bin, use in uses.items():
        if use.memory_bytes > use.capacity_bytes:
            yield f"'{bin}' holds {use.memory_bytes} bytes and has {use.capacity_bytes}"
        if use.load > use.capacity_load + TOLERANCE:
            yield f"'{bin}' has the load {use.load:g}, and {use.capacity_load:g} is allowed"
        if use.num_models > use.max_models:
            yield f"'{bin}' is shared by {use.num_models} replicas; {use.max_models} may"
    for device in problem.devices:
        slices = solution.slices(device.name)
        if slices and Bin(device.name) in uses:
            yield f"device '{device.name}' is used whole and partitioned at once"
        num_slices = {profile.name: profile.num_slices for profile in device.mig}
        for one, other in pairwise(slices):
            if one.start + num_slices[one.profile] > other.start:
                yield f"MIG slices '{one}' and '{other}' overlap"
    yield from _ill_distributed(problem, solution, missing)


def _ill_distributed(problem: Problem, solution: Solution, missing: Mapping[str, int]) -> Iterator[str]:
    devices = {device.name: device for device in problem.devices}
    in_domain: Counter[tuple[str, str]] = Counter()
    for name, _, bin in solution.assignments:
        in_domain[name, devices[bin.device].in_domain] += 1
    for workload in problem.workloads:
        if not workload.spread or workload.name in missing:
            continue
        fewest, most = problem.replicas_per_domain(workload)
        for domain in problem.domains_of(workload):
            if not fewest <= (number := in_domain[workload.name, domain]) <= most:
                yield f"'{workload.name}' has {number} replicas in domain '{domain}'; {fewest} to {most} may be"


def numbered(counts: Mapping[str, Counter[Bin]], previous: Solution | None) -> tuple[Assignment, ...]:
    """Number the replicas, given how many each holder has; one that stays keeps its number if it can."""
    before = by_workload(previous)
    assignments: list[Assignment] = []
    for name, counter in counts.items():
        left, kept = Counter(counter), dict[int, Bin]()
        for replica, bin in sorted(before.get(name, {}).items()):
            if replica < counter.total() and left[bin] > 0:
                left[bin] -= 1
                kept[replica] = bin
        free = iter(sorted(left.elements()))
        assignments += (Assignment(name, n, kept[n] if n in kept else next(free)) for n in range(counter.total()))
    return tuple(assignments)


def by_workload(solution: Solution | None) -> dict[str, dict[int, Bin]]:
    """Holders of replicas, by workload and replica."""
    found: dict[str, dict[int, Bin]] = defaultdict(dict)
    for name, replica, bin in solution.assignments if solution else ():
        found[name][replica] = bin
    return found
