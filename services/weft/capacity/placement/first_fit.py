"""First-fit decreasing for vector bin packing, from several starts.

Replicas are taken by decreasing size, each into the fullest device that is in use and has room, else into a new device:
the cheapest, or that which is cheapest for what it can hold. Sizes are shares of what a device offers, since bytes and
load cannot be compared. Every way to sort and to choose is tried, devices that can be emptied into others are, and the
best result counts. Source: Panigrahy, Talwar, Uyeda and Wieder, "Heuristics for Vector Bin Packing" (2011).
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

from weft.capacity.placement.alike import relabelled
from weft.capacity.placement.changes import num_moved, numbered
from weft.capacity.placement.packing import Packing
from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import Bin, Solution, Unplaced, cost_per_hour, use_of

#: Past so many pairs of a replica and a device one start is enough.
_MANY_PAIRS = 200_000
#: How the two sizes of a replica, of memory and load, make one.
_SIZES: dict[str, Callable[[float, float], float]] = {
    "max": max,
    "sum": lambda memory, load: memory + load,
    "memory": lambda memory, load: memory,
    "load": lambda memory, load: load,
}
Score = tuple[float, float, float, float, float, int]


class _Way(NamedTuple):
    """One way to pack: how to sort, how to choose a new device, whether to slice it, whether to begin with what was."""

    size: str
    by_capacity: bool
    slices: bool
    keeps: bool


def first_fit(problem: Problem, previous: Solution | None = None, *, keeps: bool = False) -> Solution:
    """A placement by first-fit decreasing; replicas for which it finds no room are in ``unplaced``, without a cause.

    Args:
        problem: Workloads and devices.
        previous: Where replicas are now.
        keeps: Whether moves count before cost.
    """
    found = (_packed(problem, way, previous) for way in _ways(problem, previous))
    best = min(found, key=lambda solution: score(problem, solution, previous, keeps=keeps))
    return relabelled(problem, best, previous)


def score(problem: Problem, solution: Solution, previous: Solution | None = None, *, keeps: bool = False) -> Score:
    """What is minimised, the first first: replicas without a place, cost, devices, moves, the highest load, slices.

    The load is that of a device; slices are the memory slices that are taken. With ``keeps``, moves come before cost.
    """
    loads: dict[str, float] = defaultdict(float)
    for bin, use in use_of(problem, solution).items():
        loads[bin.device] += use.load
    num_unplaced, moves = sum(entry.num_replicas for entry in solution.unplaced), num_moved(previous, solution)
    cost, num_devices = round(cost_per_hour(problem, solution), 9), len(solution.devices)
    order = (moves, cost, num_devices) if keeps else (cost, num_devices, moves)
    return (num_unplaced, *order, round(max(loads.values(), default=0.0), 9), num_slices(problem, solution))


def num_slices(problem: Problem, solution: Solution) -> int:
    """The memory slices of partitioned GPUs that are taken."""
    sizes = {(device.name, profile.name): profile.num_slices for device in problem.devices for profile in device.mig}
    return sum(sizes[bin.device, bin.profile] for bin in {e.bin for e in solution.assignments} if bin.profile)


def _ways(problem: Problem, previous: Solution | None) -> Iterator[_Way]:
    has_mig = any(device.mig for device in problem.devices)
    is_large = problem.num_replicas * len(problem.devices) > _MANY_PAIRS
    yield _Way("max", True, False, previous is not None)
    if is_large:
        return
    for way in product(
        _SIZES, (True, False), (False, True) if has_mig else (False,), (False, True) if previous else (False,)
    ):
        yield _Way(*way)


def _packed(problem: Problem, way: _Way, previous: Solution | None) -> Solution:
    packing = Packing(problem)
    left = {workload.name: workload.num_replicas for workload in problem.workloads}
    if way.keeps and previous:
        _keep(packing, previous, left)
    sizes = _Sizes(problem)
    for workload in sorted(problem.workloads, key=lambda workload: (-sizes.of(workload, way.size), workload.name)):
        while left[workload.name] and (bin := _best(packing, sizes, workload, way)):
            packing.put(workload, bin)
            left[workload.name] -= 1
    unplaced = tuple(Unplaced(name, number, "") for name, number in left.items() if number)
    if not way.keeps:
        _empty_devices(packing, sizes, way)
    return Solution(numbered(packing.counts, previous), unplaced)


def _keep(packing: Packing, previous: Solution, left: dict[str, int]) -> None:
    """Put replicas where they were, as far as the rules allow; what spreads may have to wait for other domains."""
    workloads = {workload.name: workload for workload in packing.problem.workloads}
    waiting = [(workloads[name], bin) for name, _, bin in previous.assignments if name in workloads]
    progress = True
    while progress:
        progress = False
        for workload, bin in waiting[:]:
            if left[workload.name] and packing.fits_at(workload, bin):
                packing.put(workload, bin)
                left[workload.name] -= 1
                waiting.remove((workload, bin))
                progress = True


class _Sizes:
    """Sizes of replicas as shares of devices.

    Args:
        problem: Workloads and devices.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self.order = sorted(problem.devices, key=lambda device: (device.cost_per_hour, device.name))
        self._kinds = {(d.device_class, d.memory_bytes): d for d in problem.devices}.values()

    def share(self, workload: Workload, device: Device) -> tuple[float, float]:
        """What a replica takes of a device's memory and of its compute."""
        load = workload.load_on(device.device_class) or 0.0
        return workload.memory_bytes / device.memory_bytes, load / self._problem.max_load

    def part(self, workload: Workload, device: Device, slices: bool) -> float:
        """The part of a device that a replica uses up, by whichever of memory, compute and number is scarcest."""
        num_models = device.max_models * (max((len(p.starts) for p in device.mig), default=1) if slices else 1)
        return max(*self.share(workload, device), 1 / num_models)

    def of(self, workload: Workload, size: str) -> float:
        """The size to sort by: that on the kind of device where it is smallest."""
        shares = [self.share(workload, d) for d in self._kinds if workload.load_on(d.device_class) is not None]
        return min((_SIZES[size](memory, load) for memory, load in shares), default=0.0)


def _best(packing: Packing, sizes: _Sizes, workload: Workload, way: _Way, forbidden: str = "") -> Bin | None:
    """Where the next replica of a workload goes: among what is in use, else in a new device; None: nowhere."""
    domains = packing.domains_for(workload)
    allowed = [
        device for device in sizes.order if device.name != forbidden and packing.admits(workload, device, domains)
    ]
    found: list[tuple[float, Bin]] = []
    for device in allowed:
        if packing.is_open(device.name):
            found += [(_left(packing, device, bin), bin) for bin in packing.open_bins(workload, device)]
    if found:
        return min(found)[1]
    for device in allowed:
        if packing.is_open(device.name) and (bin := packing.new_slice(workload, device)):
            return bin
    if forbidden:
        return None
    closed = [device for device in allowed if not packing.is_open(device.name)]
    if way.by_capacity:
        closed.sort(key=lambda device: device.cost_per_hour * sizes.part(workload, device, way.slices))
    for device in closed:
        ways = (packing.new_slice, packing.whole) if way.slices else (packing.whole, packing.new_slice)
        for make in ways:
            if bin := make(workload, device):
                return bin
    return None


def _left(packing: Packing, device: Device, bin: Bin) -> float:
    """How much of a device is still free; the least is chosen (best fit)."""
    room = packing.rooms[bin]
    return room.memory_bytes / device.memory_bytes + room.load


def _empty_devices(packing: Packing, sizes: _Sizes, way: _Way) -> None:
    """Move all replicas of a device into others that are in use, if they fit, the dearest device first."""
    for device in reversed(sizes.order):
        held = packing.held(device.name)
        moved: list[tuple[Workload, Bin, Bin]] = []
        for workload, bin in sorted(held, key=lambda entry: -sizes.of(entry[0], way.size)):
            packing.take(workload, bin)
            target = _best(packing, sizes, workload, way, forbidden=device.name)
            if target is None:
                packing.put(workload, bin)
                for other, before, after in reversed(moved):
                    packing.take(other, after)
                    packing.put(other, before)
                break
            packing.put(workload, target)
            moved.append((workload, bin, target))
