"""The best placement by OR-tools' CP-SAT solver.

Replicas of a workload are alike, so the model counts them: one number for each workload and each device or slice that
may hold it. Which slices a GPU has is part of the search: each possible slice is a boolean, and those that overlap
exclude each other. Cost, moves and the highest load are minimised one after another. One worker, a fixed seed and a
limit in deterministic time give the same answer on every machine.
Source: https://developers.google.com/optimization/cp/cp_solver
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from weft.capacity.placement.alike import alike, relabelled
from weft.capacity.placement.changes import numbered
from weft.capacity.placement.first_fit import score
from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import TOLERANCE, Bin, Solution, Unplaced, capacity, cost_per_hour, faults

#: Units of compute in a whole device. Rounding a load is wrong by half of one, far below ``TOLERANCE``.
_LOAD_UNITS = 1_000_000
_COST_UNITS = 1_000_000
_BALANCE_UNITS = 10_000
#: Above this, bytes are rounded (up for replicas, down for devices), so that sums stay exact integers.
_MAX_BYTES = 1 << 44
#: Larger models take longer to build than they are worth.
MAX_VARIABLES = 200_000
#: Parts of the time; what one leaves the next one has, but for the balance: it is worth no long search.
_PARTS = {"missing": 0.4, "cost": 0.5, "moves": 0.3, "balance": 0.1}
#: Wall-clock seconds for one of deterministic time, after which a search is given up all the same.
_SLOWEST = 20


def improved(
    problem: Problem, start: Solution, previous: Solution | None, time_limit_s: float, *, keeps: bool = False
) -> Solution:
    """The best placement that is found in the time, or ``start`` if none is better; notes say what was not proved.

    Args:
        problem: Workloads and devices.
        start: A placement that holds, to begin with.
        previous: Where replicas are now.
        time_limit_s: In deterministic seconds.
        keeps: Whether moves count before cost.

    Raises:
        ImportError: OR-tools is not installed.
    """
    from ortools.sat.python import cp_model  # noqa: PLC0415

    devices = list(problem.devices) if keeps else _worthwhile(problem, start, previous)
    num_variables = sum(len(_shapes(device)) for device in devices) * len(problem.workloads)
    if num_variables > MAX_VARIABLES:
        note = (
            f"too large for the exact solver ({num_variables} variables, at most {MAX_VARIABLES}): first-fit decreasing"
        )
        return replace(start, notes=(*start.notes, note))
    return _Search(cp_model, problem, devices, start, previous, keeps=keeps).run(time_limit_s)


def _worthwhile(problem: Problem, start: Solution, previous: Solution | None) -> list[Device]:
    """The devices without those that cannot be of use: of alike ones, more than the cost of ``start`` pays for."""
    if start.unplaced:
        return list(problem.devices)
    most = cost_per_hour(problem, start)
    kept: list[Device] = []
    for group in alike(problem, previous):
        cost = group[0].cost_per_hour
        kept += group if cost <= 0 else group[: math.floor(most / cost + TOLERANCE)]
    return sorted(kept, key=problem.devices.index)


def _shapes(device: Device) -> list[tuple[Bin, range]]:
    """The whole device and every slice that it can have, with the memory slices that they occupy."""
    num_slices = max((start + profile.num_slices for profile in device.mig for start in profile.starts), default=1)
    slices = [
        (Bin(device.name, profile.name, start), range(start, start + profile.num_slices))
        for profile in device.mig
        for start in profile.starts
    ]
    return [(Bin(device.name), range(num_slices)), *slices]


class _Search:
    """The model of a problem, and its solution step by step.

    Args:
        cp_model: OR-tools' module.
        problem: Workloads and devices.
        devices: Those that are considered.
        start: A placement that holds.
        previous: Where replicas are now.
        keeps: Whether moves count before cost.
    """

    def __init__(
        self,
        cp_model: Any,
        problem: Problem,
        devices: list[Device],
        start: Solution,
        previous: Solution | None,
        *,
        keeps: bool,
    ) -> None:
        self._cp_model = cp_model
        self._problem = problem
        self._devices = devices
        self._previous = previous
        self._keeps = keeps
        self._best = start
        self._model = cp_model.CpModel()
        self._count: dict[tuple[str, Bin], Any] = {}
        self._open: dict[Bin, Any] = {}
        self._used: dict[str, Any] = {}
        self._missing: dict[str, Any] = {}
        self._loads: list[Any] = []
        self._byte_unit = _byte_unit(problem)
        self._dearest = max((device.cost_per_hour for device in devices), default=0.0) or 1.0
        self._per_device = len(devices) + 1
        self._build()

    def run(self, time_limit_s: float) -> Solution:
        """Minimise one thing after another, each without making an earlier one worse."""
        is_optimal, left_s, saved_s, bound = True, time_limit_s, 0.0, 0.0
        notes = []
        steps = [(name, aim) for name, aim in self._aims() if not isinstance(aim, int)]
        for name, aim in steps:
            self._hint()
            allowed_s = min(left_s, time_limit_s * _PARTS[name] + (saved_s if name != "balance" else 0.0))
            self._model.minimize(aim)
            solver = self._cp_model.CpSolver()
            solver.parameters.num_workers = 1
            solver.parameters.random_seed = 0
            solver.parameters.linearization_level = 2  # proves costs of MIG slices that the default does not
            solver.parameters.max_deterministic_time = max(allowed_s, 1e-3)
            solver.parameters.max_time_in_seconds = _SLOWEST * max(allowed_s, 1.0)
            status = solver.solve(self._model)
            took_s = solver.response_proto.deterministic_time
            saved_s, left_s = max(allowed_s - took_s, 0.0), max(left_s - took_s, 0.0)
            if status not in (self._cp_model.OPTIMAL, self._cp_model.FEASIBLE):
                is_optimal = False
                notes.append(f"no answer for the {name} within {time_limit_s:g} s of search")
                break
            self._take(solver)
            if name == "cost" and not self._keeps:
                bound = round(solver.best_objective_bound) // self._per_device * self._dearest / _COST_UNITS
            if status != self._cp_model.OPTIMAL:
                is_optimal = False
                gap = _gap(solver.objective_value, solver.best_objective_bound)
                notes.append(f"the {name} is not proved to be the least: at most {gap:.1%} above it")
            self._model.add(aim <= round(solver.objective_value))
        return replace(self._best, is_optimal=is_optimal, cost_bound=round(bound, 9), notes=(*self._best.notes, *notes))

    def _take(self, solver: Any) -> None:
        """Keep the answer of the solver, if it is no worse than what is known."""
        counts: dict[str, Counter[Bin]] = {workload.name: Counter() for workload in self._problem.workloads}
        for (name, bin), variable in self._count.items():
            if number := solver.value(variable):
                counts[name][bin] = number
        unplaced = tuple(
            Unplaced(workload.name, number, "")
            for workload in self._problem.workloads
            if (number := workload.num_replicas - counts[workload.name].total())
        )
        found = Solution(numbered(counts, self._previous), unplaced, method="cp-sat")
        if self._score(found) <= self._score(self._best) and not faults(self._problem, found):
            self._best = found

    def _score(self, solution: Solution) -> tuple[float, ...]:
        return score(self._problem, solution, self._previous, keeps=self._keeps)

    def _hint(self) -> None:
        self._model.clear_hints()
        best = Counter(
            (name, bin) for name, _, bin in relabelled(self._problem, self._best, self._previous).assignments
        )
        for key, variable in self._count.items():
            self._model.add_hint(variable, best[key])

    def _build(self) -> None:
        for device in self._devices:
            self._add_device(device)
        for workload in self._problem.workloads:
            here = [variable for (name, _), variable in self._count.items() if name == workload.name]
            most_missing = workload.num_replicas if self._best.unplaced else 0
            missing = self._model.new_int_var(0, most_missing, f"missing {workload.name}")
            self._missing[workload.name] = missing
            self._model.add(sum(here) + missing == workload.num_replicas)
            if workload.spread:
                self._add_spread(workload)
        self._add_apart()
        for group in alike(self._problem, self._previous):
            present = [self._used[device.name] for device in group if device.name in self._used]
            for one, other in pairwise(present):
                self._model.add_implication(other, one)

    def _add_device(self, device: Device) -> None:
        used = self._used[device.name] = self._model.new_bool_var(f"used {device.name}")
        over: dict[int, list[Any]] = defaultdict(list)  # memory slice -> what may occupy it
        filled = []
        shapes = _shapes(device)
        for bin, occupied in shapes:
            opened = self._open[bin] = self._model.new_bool_var(f"open {bin}")
            for memory_slice in occupied:
                over[memory_slice].append(opened)
            filled.append(self._fill(device, bin, opened))
        if len(shapes) == 1:
            self._model.add(self._open[shapes[0][0]] == used)
        for present in over.values() if len(shapes) > 1 else ():
            self._model.add(sum(present) <= used)
        self._loads.append(sum(load for _, load in filled))
        if len(shapes) > 1:  # follows from the rest, and bounds the cost
            self._model.add(sum(memory for memory, _ in filled) <= device.memory_bytes // self._byte_unit * used)
            self._model.add(sum(load for _, load in filled) <= _units(self._problem.max_load + TOLERANCE / 2) * used)

    def _fill(self, device: Device, bin: Bin, opened: Any) -> tuple[Any, Any]:
        """What may be in a device or slice together; returns the memory and the load of what is."""
        capacity_bytes, capacity_load = capacity(self._problem, device, bin.profile)
        num_bytes, units = capacity_bytes // self._byte_unit, _units(capacity_load + TOLERANCE / 2)
        memory, load, number = [], [], []
        for workload in self._problem.workloads:
            share = workload.load_on(device.device_class)
            if share is None or workload.memory_bytes > capacity_bytes or share > capacity_load + TOLERANCE:
                continue
            most = min(workload.num_replicas, device.max_models)
            variable = self._count[workload.name, bin] = self._model.new_int_var(0, most, f"{workload.name} {bin}")
            self._model.add(variable <= most * opened)
            memory.append(variable * math.ceil(workload.memory_bytes / self._byte_unit))
            load.append(variable * _units(share))
            number.append(variable)
        self._model.add(sum(memory) <= num_bytes * opened)
        self._model.add(sum(load) <= units * opened)
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

    def _add_apart(self) -> None:
        on_host: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        host_of = {device.name: device.on_host for device in self._devices}
        for (name, bin), variable in self._count.items():
            on_host[host_of[bin.device]][name].append(variable)
        workloads = {workload.name: workload for workload in self._problem.workloads}
        concerned = {name for w in self._problem.workloads if w.apart_from for name in (w.name, *w.apart_from)}
        for host, replicas in on_host.items():
            is_there = {name: self._model.new_bool_var(f"{name} on {host}") for name in concerned & replicas.keys()}
            for name, there in is_there.items():
                workload = workloads[name]
                most = 1 if name in workload.apart_from else workload.num_replicas
                self._model.add(sum(replicas[name]) <= most * there)
                for other in sorted(workload.apart_from & is_there.keys() - {name}):
                    self._model.add(there + is_there[other] <= 1)

    def _aims(self) -> Iterable[tuple[str, Any]]:
        """What is minimised, the first first."""
        if self._best.unplaced:
            yield "missing", sum(self._missing.values())
        order = [("cost", self._cost()), ("moves", self._moves())]
        yield from reversed(order) if self._keeps else order
        yield "balance", self._highest_load()

    def _cost(self) -> Any:
        """Of what is used; of two placements of one cost, the one with fewer devices has less."""
        return sum(
            (round(device.cost_per_hour / self._dearest * _COST_UNITS) * self._per_device + 1) * self._used[device.name]
            for device in self._devices
        )

    def _moves(self) -> Any:
        """Replicas that may stay, less those that do."""
        before = Counter((name, bin) for name, _, bin in self._previous.assignments) if self._previous else {}
        stayed = []
        for key, number in before.items():
            if key in self._count:
                kept = self._model.new_int_var(0, number, f"kept {key}")
                self._model.add(kept <= self._count[key])
                stayed.append(kept)
        return -sum(stayed) if stayed else 0

    def _highest_load(self) -> Any:
        """Of a device; of two placements with one, that with smaller slices has less."""
        highest = self._model.new_int_var(0, _BALANCE_UNITS + 1, "highest load")
        per_unit = _LOAD_UNITS // _BALANCE_UNITS
        for load in self._loads:
            self._model.add(load <= highest * per_unit)
        taken = [self._open[bin] * len(slices) for d in self._devices for bin, slices in _shapes(d) if bin.profile]
        most = sum(len(_shapes(device)[0][1]) for device in self._devices) + 1
        return highest * most + sum(taken)


def _byte_unit(problem: Problem) -> int:
    """The bytes that are counted as one: all that sizes are multiples of, and more where they are huge."""
    sizes = [workload.memory_bytes for workload in problem.workloads]
    sizes += [device.memory_bytes for device in problem.devices]
    sizes += [profile.memory_bytes for device in problem.devices for profile in device.mig]
    return max(math.gcd(*sizes), -(-max(sizes) // _MAX_BYTES), 1)


def _units(load: float) -> int:
    return round(load * _LOAD_UNITS)


def _gap(value: float, bound: float) -> float:
    return (value - bound) / abs(value) if value else 0.0
