"""Finds the best placement with OR-tools' CP-SAT solver.

Replicas of a workload are interchangeable, so the model counts them: one number for each workload and each device or
slice that may hold it. Which slices a GPU has is part of the search: each possible slice is a boolean, and those that
overlap exclude each other. From a simple placement as a hint, replicas without a place, cost, moves and the highest
load are minimised one after another. One worker, a fixed seed and a limit in deterministic time give the same answer on
every machine.
Source: https://developers.google.com/optimization/cp/cp_solver
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import (
    TOLERANCE,
    Bin,
    Solution,
    Unplaced,
    capacity,
    cost_per_hour,
    faults,
    numbered,
)

#: Units of compute in a whole device. Rounding a load is wrong by half of one, far below ``TOLERANCE``.
_LOAD_UNITS = 1_000_000
_COST_UNITS = 1_000_000
_BALANCE_UNITS = 10_000
#: Above this, bytes are rounded (up for replicas, down for devices), so that sums stay exact integers.
_MAX_BYTES = 1 << 44
#: Larger models take longer to build than they are worth.
MAX_VARIABLES = 200_000
#: What is minimised, the first first, each with its part of the time; what one leaves the next one has, but for the
#: balance: it is worth no long search.
_PARTS = {"missing": 0.4, "cost": 0.5, "moves": 0.3, "balance": 0.1}
#: Wall-clock seconds for one of deterministic time, after which a search is given up all the same.
_SLOWEST = 20


class Search:
    """The CP-SAT model of a problem, solved one objective after another.

    Args:
        previous: Current places of replicas.
        keeps: Whether moves count before cost.
    """

    def __init__(self, problem: Problem, previous: Solution | None = None, *, keeps: bool = False) -> None:
        from ortools.sat.python import cp_model  # noqa: PLC0415  # the extra [plan]

        self._cp_model: Any = cp_model
        self._model: Any = cp_model.CpModel()
        self._problem = problem
        self._previous = previous
        self._keeps = keeps
        self._groups = _alike(problem, previous)
        self._devices = [device for group in self._groups for device in group]
        self._variables: list[Any] = []
        self._count: dict[tuple[str, Bin], Any] = {}
        self._open: dict[Bin, Any] = {}
        self._used: dict[str, Any] = {}
        self._missing: dict[str, Any] = {}
        self._loads: list[Any] = []
        sizes = [workload.memory_bytes for workload in problem.workloads]
        sizes += [device.memory_bytes for device in problem.devices]
        sizes += [profile.memory_bytes for device in problem.devices for profile in device.mig]
        #: Bytes that are counted as one: all that sizes are multiples of, and more where they are huge.
        self._byte_unit = max(math.gcd(*sizes), -(-max(sizes) // _MAX_BYTES), 1)
        self._dearest = max((device.cost_per_hour for device in self._devices), default=0.0) or 1.0
        self._best = self._solution({})
        self._num_variables = sum(map(len, map(_shapes, self._devices))) * len(problem.workloads)
        if self._num_variables <= MAX_VARIABLES:
            self._build()

    def run(self, time_limit_s: float, aims: Sequence[str] = tuple(_PARTS)) -> Solution:
        """Minimise one objective after another, without worsening earlier ones; notes list what is not proved.

        Args:
            time_limit_s: For everything, in deterministic seconds.
        """
        hint = first_fit(self._problem, self._devices, self._previous)
        if self._num_variables > MAX_VARIABLES:
            note = f"too large for the solver ({self._num_variables} variables, at most {MAX_VARIABLES}): first-fit"
            return replace(self._solution(hint), notes=(note,))
        self._begin(hint, time_limit_s)
        is_optimal, left_s, saved_s, bound = True, time_limit_s, 0.0, 0.0
        notes = []
        for name, aim in self._aims():
            if name not in aims or isinstance(aim, int):
                continue
            if name == "missing" and not self._best.unplaced:
                self._model.add(aim == 0)
                continue
            allowed_s = min(left_s, time_limit_s * _PARTS[name] + (saved_s if name != "balance" else 0.0))
            self._model.minimize(aim)
            solver = self._solver(allowed_s)
            is_solved = self._solve(solver)
            took_s = solver.response_proto.deterministic_time
            saved_s, left_s = max(allowed_s - took_s, 0.0), max(left_s - took_s, 0.0)
            if not is_solved:
                is_optimal = False
                notes.append(f"no answer for the {name} within {time_limit_s:g} s of search")
                break
            self._take(solver)
            value, least = solver.objective_value, solver.best_objective_bound
            if name == "cost" and not self._keeps:
                bound = round(least) // (len(self._devices) + 1) * self._dearest / _COST_UNITS
            if value > least:
                is_optimal = False
                gap = (value - least) / abs(value) if value else 0.0
                notes.append(f"the {name} is not proved to be the least: at most {gap:.1%} above it")
            self._model.add(aim <= round(value))
        return replace(self._best, is_optimal=is_optimal, cost_bound=round(bound, 9), notes=tuple(notes))

    def _begin(self, hint: Mapping[tuple[str, Bin], int], time_limit_s: float) -> None:
        """Start from first-fit decreasing; with hundreds of devices the solver alone exceeds the time limit."""
        for key, variable in self._count.items():
            self._model.add_hint(variable, hint.get(key, 0))
        self._model.minimize(self._cost())  # leaves nothing open that holds nothing
        solver = self._solver(time_limit_s)
        solver.parameters.fix_variables_to_their_hinted_value = True
        if self._solve(solver):
            self._take(solver)

    def _solver(self, limit_s: float) -> Any:
        solver = self._cp_model.CpSolver()
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2  # proves costs of MIG slices that the default does not
        solver.parameters.max_deterministic_time = max(limit_s, 1e-3)
        solver.parameters.max_time_in_seconds = _SLOWEST * max(limit_s, 1.0)
        return solver

    def _solve(self, solver: Any) -> bool:
        return solver.solve(self._model) in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE)

    def _take(self, solver: Any) -> None:
        """Keep the solver's answer as the start of the next search."""
        found = self._solution({key: solver.value(variable) for key, variable in self._count.items()})
        num_more = len(found.assignments) - len(self._best.assignments)
        is_dearer = cost_per_hour(self._problem, found) > cost_per_hour(self._problem, self._best) + TOLERANCE
        is_worse = num_more < 0 or (num_more == 0 and is_dearer and not self._keeps)
        if is_worse or faults(self._problem, found):  # where the hint was lost, or by a rounding
            return
        self._best = found
        self._model.clear_hints()
        for variable in self._variables:
            self._model.add_hint(variable, solver.value(variable))

    def _solution(self, held: Mapping[tuple[str, Bin], int]) -> Solution:
        counts: dict[str, Counter[Bin]] = {workload.name: Counter() for workload in self._problem.workloads}
        for (name, bin), number in held.items():
            if number:
                counts[name][bin] = number
        missing = ((each.name, each.num_replicas - counts[each.name].total()) for each in self._problem.workloads)
        unplaced = tuple(Unplaced(name, number, "") for name, number in missing if number)
        return Solution(numbered(counts, self._previous), unplaced)

    def _integer(self, highest: int) -> Any:
        self._variables.append(self._model.new_int_var(0, highest, ""))
        return self._variables[-1]

    def _build(self) -> None:
        for device in self._devices:
            self._add_device(device)
        here: dict[str, list[Any]] = defaultdict(list)
        for (name, _), variable in self._count.items():
            here[name].append(variable)
        for workload in self._problem.workloads:
            missing = self._missing[workload.name] = self._integer(workload.num_replicas)
            self._model.add(sum(here[workload.name]) + missing == workload.num_replicas)
            if workload.spread:
                self._add_spread(workload)
        for group in self._groups:
            for one, other in pairwise(group):
                self._model.add_implication(self._used[other.name], self._used[one.name])

    def _add_device(self, device: Device) -> None:
        used = self._used[device.name] = self._integer(1)
        over: dict[int, list[Any]] = defaultdict(list)  # memory slice -> what may occupy it
        filled = []
        shapes = _shapes(device)
        for bin, occupied in shapes:
            opened = self._open[bin] = used if len(shapes) == 1 else self._integer(1)
            for memory_slice in occupied:
                over[memory_slice].append(opened)
            filled.append(self._fill(device, bin, opened))
        load = sum(load for _, load in filled)
        self._loads.append(load)
        if len(shapes) > 1:
            for present in over.values():
                self._model.add(sum(present) <= used)
            # These follow from the rest, and bound the cost.
            self._model.add(sum(memory for memory, _ in filled) <= device.memory_bytes // self._byte_unit * used)
            self._model.add(load <= _units(self._problem.max_load + TOLERANCE / 2) * used)

    def _fill(self, device: Device, bin: Bin, opened: Any) -> tuple[Any, Any]:
        """Constrain the content of a device or slice; returns its memory and load."""
        capacity_bytes, capacity_load = capacity(self._problem, device, bin.profile)
        memory, load, number = [], [], []
        for workload in self._problem.workloads:
            share = workload.load_on(device.device_class)
            together = self._problem.devices_of(workload, device)
            if share is None or not together or (bin.profile and len(together) > 1):
                continue
            rooms = [capacity(self._problem, each, bin.profile) for each in together]
            if any(workload.memory_bytes > room or share > load + TOLERANCE for room, load in rooms):
                continue
            most = min(workload.num_replicas, device.max_models)
            key = workload.name, bin._replace(device=together[0].name)
            if key not in self._count:
                self._count[key] = self._integer(most)
            variable = self._count[key]
            self._model.add(variable <= most * opened)
            memory.append(variable * math.ceil(workload.memory_bytes / self._byte_unit))
            load.append(variable * _units(share))
            number.append(variable)
        self._model.add(sum(memory) <= capacity_bytes // self._byte_unit * opened)
        self._model.add(sum(load) <= _units(capacity_load + TOLERANCE / 2) * opened)
        self._model.add(sum(number) <= device.max_models * opened)
        return sum(memory), sum(load)

    def _add_spread(self, workload: Workload) -> None:
        fewest, most = self._problem.replicas_per_domain(workload)
        in_domain: dict[str, list[Any]] = {domain: [] for domain in self._problem.domains_of(workload)}
        for device in self._devices:
            for bin, _ in _shapes(device):
                if (workload.name, bin) in self._count:
                    in_domain[device.in_domain].append(self._count[workload.name, bin])
        for variables in in_domain.values():
            self._model.add(sum(variables) <= most)
            self._model.add(sum(variables) + self._missing[workload.name] >= fewest)

    def _aims(self) -> Iterator[tuple[str, Any]]:
        yield "missing", sum(self._missing.values())
        order = [("cost", self._cost()), ("moves", self._moves())]
        yield from reversed(order) if self._keeps else order
        yield "balance", self._highest_load()

    def _cost(self) -> Any:
        """Cost of used devices; among equal costs, fewer devices win."""
        per_device = len(self._devices) + 1
        return sum(
            (round(device.cost_per_hour / self._dearest * _COST_UNITS) * per_device + 1) * self._used[device.name]
            for device in self._devices
        )

    def _moves(self) -> Any:
        """Cost of moves: minus the number of replicas that stay where they are."""
        before = Counter((name, bin) for name, _, bin in self._previous.assignments) if self._previous else {}
        stayed = []
        for key, number in before.items():
            if key in self._count:
                kept = self._model.new_int_var(0, number, "")
                self._model.add(kept <= self._count[key])
                stayed.append(kept)
        return -sum(stayed) if stayed else 0

    def _highest_load(self) -> Any:
        """Highest load of a device; among equal loads, smaller slices win."""
        highest = self._model.new_int_var(0, _BALANCE_UNITS + 1, "")
        for load in self._loads:
            self._model.add(load <= highest * (_LOAD_UNITS // _BALANCE_UNITS))
        taken = [self._open[bin] * len(slices) for d in self._devices for bin, slices in _shapes(d) if bin.profile]
        most = sum(len(_shapes(device)[0][1]) for device in self._devices) + 1
        return highest * most + sum(taken)


def first_fit(problem: Problem, devices: Sequence[Device], previous: Solution | None) -> Counter[tuple[str, Bin]]:
    """Place replicas by first fit: by decreasing size, each into the first whole device with room.

    Replicas stay where they are if they fit. Devices are sorted by price per capacity, those in use first.
    """
    room = {d.name: [d.memory_bytes, problem.max_load + TOLERANCE / 2, d.max_models] for d in devices}
    found: Counter[tuple[str, Bin]] = Counter()
    in_domain: dict[str, Counter[str]] = defaultdict(Counter)  # workload -> domain
    used: set[str] = set()
    held = {(name, bin.device) for name, _, bin in previous.assignments if not bin.profile} if previous else set()

    def put(workload: Workload, device: Device, fewest: int) -> bool:
        needed = (workload.memory_bytes, workload.load_on(device.device_class) or 0.0, 1)
        together = problem.devices_of(workload, device)
        if any(size > left for each in together for size, left in zip(needed, room[each.name], strict=True)) or (
            workload.spread and in_domain[workload.name][device.in_domain] > fewest
        ):
            return False
        for each in together:
            room[each.name] = [left - size for size, left in zip(needed, room[each.name], strict=True)]
            used.add(each.name)
        in_domain[workload.name][device.in_domain] += 1
        found[workload.name, Bin(device.name)] += 1
        return True

    def part(workload: Workload, device: Device) -> float:
        """Of a device that a replica uses up, by whichever of memory, compute and number is scarcest."""
        load = (workload.load_on(device.device_class) or 0.0) / problem.max_load
        return max(workload.memory_bytes / device.memory_bytes, load, 1 / device.max_models)

    usable = {w.name: [d for d in devices if problem.devices_of(w, d)[:1] == (d,)] for w in problem.workloads}
    least = {w.name: min((part(w, d) for d in usable[w.name]), default=0.0) for w in problem.workloads}
    for workload in sorted(problem.workloads, key=lambda each: -least[each.name]):
        domains = problem.domains_of(workload)
        price = {d.name: d.cost_per_hour * part(workload, d) for d in usable[workload.name]}
        by_price = sorted(usable[workload.name], key=lambda d: price[d.name])
        for _ in range(workload.num_replicas):
            fewest = min((in_domain[workload.name][domain] for domain in domains), default=0)
            by_price.sort(key=lambda d: ((workload.name, d.name) not in held, d.name not in used))
            if not any(put(workload, device, fewest) for device in by_price):
                break
    return found


def fewest_missing(problem: Problem, time_limit_s: float) -> int:
    """The fewest replicas without a place that the search finds in the time. Raises UnsupportedError."""
    return sum(entry.num_replicas for entry in Search(problem).run(time_limit_s, ("missing",)).unplaced)


def _alike(problem: Problem, previous: Solution | None) -> list[list[Device]]:
    """Groups of interchangeable devices, each with as many as can be useful."""
    if any(workload.num_devices > 1 for workload in problem.workloads):  # which are next to one another counts
        return [[device] for device in problem.devices]
    held = set(previous.devices) if previous else set[str]()
    domains_count = any(workload.spread for workload in problem.workloads)
    groups: dict[Any, list[Device]] = defaultdict(list)
    for device in problem.devices:
        kind = replace(device, name="", index=None, host="", domain=device.in_domain if domains_count else "")
        groups[device.name if device.name in held else kind].append(device)
    return [group[: max(problem.num_replicas, 1)] for group in groups.values()]


def _shapes(device: Device) -> list[tuple[Bin, range]]:
    """The whole device and every possible slice, with the memory slices they occupy."""
    num_slices = max((start + profile.num_slices for profile in device.mig for start in profile.starts), default=1)
    slices = [
        (Bin(device.name, profile.name, start), range(start, start + profile.num_slices))
        for profile in device.mig
        for start in profile.starts
    ]
    return [(Bin(device.name), range(num_slices)), *slices]


def _units(load: float) -> int:
    return round(load * _LOAD_UNITS)
