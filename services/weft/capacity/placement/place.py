"""Places replicas, explains why some have no place, and compares placements."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import (
    TOLERANCE,
    Assignment,
    Bin,
    Solution,
    by_workload,
    capacity,
    cost_per_hour,
    faults,
    gib,
)
from weft.capacity.placement.solver import Search, fewest_missing

#: How long the solver may search for a placement, and for a cure, in its own deterministic seconds.
TIME_LIMIT_S = 5.0
_CURE_LIMIT_S = 0.5
#: Devices that are added at most to see how many are missing.
_MAX_ADDED = 32
#: Past so many pairs of a replica and a device, trying cures takes too long.
_MANY_PAIRS = 20_000


def place(
    problem: Problem, previous: Solution | None = None, *, time_limit_s: float = TIME_LIMIT_S, keeps: bool = False
) -> Solution:
    """Place every replica: least cost first, then fewest moves, then most even load.

    Args:
        previous: Current places of replicas, of the same or another problem.
        time_limit_s: Deterministic search time, the same on every machine.
        keeps: Fewest moves first, then the least cost.

    Returns:
        A placement that breaks no rule of the problem. Replicas without a place are in ``unplaced``, with a certain
        cause, or with a change that would make everything fit.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    solution = Search(problem, previous, keeps=keeps).run(time_limit_s)
    workloads = {workload.name: workload for workload in problem.workloads}
    why = {entry.workload: next(_causes(problem, workloads[entry.workload]), "") for entry in solution.unplaced}
    is_small = problem.num_replicas * len(problem.devices) <= _MANY_PAIRS
    cures = list(_cures(problem)) if is_small and not all(why.values()) else []
    for name, cause in why.items():
        if not cause:
            size = gib(workloads[name].memory_bytes)
            parts = [f"what is left of the devices that it may use does not hold a replica of {size}", *cures]
            parts += _with_more(problem, workloads[name]) if is_small else []
            why[name] = "; ".join(parts)
    return replace(solution, unplaced=tuple(entry._replace(why=why[entry.workload]) for entry in solution.unplaced))


def _causes(problem: Problem, workload: Workload) -> Iterator[str]:
    usable = problem.usable(workload)
    if not usable and any(workload.load_on(device.device_class) is not None for device in problem.devices):
        yield f"its ranks take {workload.num_devices} devices of one host, and no host has as many; add devices to one"
        return
    if not usable:
        wanted, there = (
            " or ".join(f"'{name}'" for name in sorted(names))
            for names in (workload.load, {device.device_class for device in problem.devices})
        )
        yield f"it may be on devices of class {wanted}, and there are only {there}"
        return
    yield from _too_large(problem, workload, usable)
    if workload.spread:
        yield from _unspreadable(problem, workload)
    yield from _exhausted(problem)


def _too_large(problem: Problem, workload: Workload, usable: list[Device]) -> Iterator[str]:
    largest = max(usable, key=lambda device: device.memory_bytes)
    if workload.memory_bytes > largest.memory_bytes:
        yield (
            f"a replica takes {gib(workload.memory_bytes)} and the largest device that it may use, '{largest.name}', "
            f"has {gib(largest.memory_bytes)}: {gib(workload.memory_bytes - largest.memory_bytes)} too much"
        )
        return
    loads = {device.name: workload.load_on(device.device_class) or 0.0 for device in usable}
    least = min(loads, key=loads.__getitem__)
    if loads[least] > problem.max_load + TOLERANCE:
        yield (
            f"a replica needs {loads[least]:.3g} of the compute of a device, at best ('{least}'), and "
            f"{problem.max_load:g} may be planned for; divide its rate among more replicas"
        )
    elif not any(_holds(problem, workload, device) for device in usable):
        yield (
            f"no single device has both {gib(workload.memory_bytes)} and the compute for a replica: the largest, "
            f"'{largest.name}', needs {loads[largest.name]:.3g} of its compute; divide its rate among more replicas"
        )


def _holds(problem: Problem, workload: Workload, device: Device) -> bool:
    """Whether an empty device holds a replica; its slices never hold more."""
    memory_bytes, share = capacity(problem, device, "")
    return workload.memory_bytes <= memory_bytes and (workload.load_on(device.device_class) or 0.0) <= share + TOLERANCE


def _unspreadable(problem: Problem, workload: Workload) -> Iterator[str]:
    fewest, most = problem.replicas_per_domain(workload)
    alone = replace(workload, spread=False, num_replicas=max(fewest, 1))
    domains = problem.domains_of(workload)
    for domain in domains if fewest else ():
        inside = tuple(device for device in problem.devices if device.in_domain == domain)
        if missing := fewest_missing(replace(problem, workloads=(alone,), devices=inside), _CURE_LIMIT_S):
            yield (
                f"spread puts {fewest} to {most} of its {workload.num_replicas} replicas into each of "
                f"{len(domains)} failure domains, and '{domain}' has room for {fewest - missing}, "
                "were it empty; give up spread, ask for fewer replicas, or add a device there"
            )


def _exhausted(problem: Problem) -> Iterator[str]:
    """A total over all workloads that exceeds any placement."""
    memory_bytes = sum(workload.memory_bytes * workload.num_replicas for workload in problem.workloads)
    there = sum(device.memory_bytes for device in problem.devices)
    if memory_bytes > there:
        yield (
            f"all replicas together take {gib(memory_bytes)} and all devices have {gib(there)}: "
            f"{gib(memory_bytes - there)} are missing"
        )
    classes = {device.device_class for device in problem.devices}
    load = 0.0
    for workload in problem.workloads:
        loads = (workload.load_on(name) for name in classes)
        load += min((each for each in loads if each is not None), default=0.0) * workload.num_replicas
    if load > (most := len(problem.devices) * problem.max_load) + TOLERANCE:
        yield (
            f"all replicas together need the compute of {load:.3g} devices at least, and {len(problem.devices)} "
            f"devices at max_load {problem.max_load:g} give {most:.3g}: {load - most:.3g} are missing"
        )


def _cures(problem: Problem) -> Iterator[str]:
    """Rules whose removal would make everything fit."""
    alone = tuple(replace(workload, spread=False) for workload in problem.workloads)
    shared = tuple(replace(device, max_models=max(problem.num_replicas, 1)) for device in problem.devices)
    relaxed = {
        "spread": replace(problem, workloads=alone),
        f"max_load {problem.max_load:g} (1 in its place)": replace(problem, max_load=1.0),
        "a limit on how many models share a device (max_models)": replace(problem, devices=shared),
    }
    for rule, other in relaxed.items():
        if other != problem and not fewest_missing(other, _CURE_LIMIT_S):
            yield f"without {rule} everything fits"


def _with_more(problem: Problem, workload: Workload) -> list[str]:
    """How many more devices would suffice; [] if a few do not."""
    usable = problem.usable(workload)
    model = min(usable, key=lambda device: (not _holds(problem, workload, device), device.cost_per_hour))
    there = tuple(replace(device, cost_per_hour=0.0) for device in problem.devices)
    added = tuple(
        replace(
            model,
            name=f"{model.name}+{n}",
            host=f"{model.on_host}+{n // workload.num_devices}",
            domain=model.in_domain,
            cost_per_hour=1.0,
        )
        for n in range(_MAX_ADDED)
    )
    found = Search(replace(problem, devices=(*there, *added))).run(2 * _CURE_LIMIT_S, ("missing", "cost"))
    number = len({device.name for device in added} & set(found.devices)) * workload.num_devices
    text = f"with {number} more of '{model.name}' ({model.device_class}) everything fits"
    return [] if found.unplaced else [text]


class Change(NamedTuple):
    """A replica that moved; ``before`` None: it is new; ``after`` None: it is gone."""

    workload: str
    replica: int
    before: Bin | None
    after: Bin | None


def changes(previous: Solution | None, solution: Solution) -> list[Change]:
    """The changes of a new placement, by workload and replica. Without an earlier one, every replica is new.

    Replicas of a workload are interchangeable, so one that is where any was has not moved.
    """
    found: list[Change] = []
    before, after = by_workload(previous), by_workload(solution)
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        stay = Counter(old.values()) & Counter(new.values())
        for was, will_be in zip_longest(_without(old, stay), _without(new, stay)):
            replica = (will_be or was or (0, None))[0]
            found.append(Change(name, replica, was[1] if was else None, will_be[1] if will_be else None))
    return found


def _without(replicas: Mapping[int, Bin], stay: Counter[Bin]) -> list[tuple[int, Bin]]:
    """The replicas without those that stay."""
    left, rest = Counter(stay), []
    for replica, bin in sorted(replicas.items()):
        if left[bin] > 0:
            left[bin] -= 1
        else:
            rest.append((replica, bin))
    return rest


class CheckedChange(NamedTuple):
    """A change and the moves that it requires.

    Attributes:
        solution: The placement after the change, with as few moves as were found.
        changes: Replicas that move, come or go, each with the cause.
    """

    solution: Solution
    differences: list[str]
    changes: list[tuple[Change, str]]
    cost_before: float
    cost_after: float

    @property
    def moves(self) -> list[tuple[Change, str]]:
        """Replicas to stop in one place and start in another."""
        return [entry for entry in self.changes if entry[0].before and entry[0].after]

    @property
    def is_unmoved(self) -> bool:
        """Whether everything has a place and nothing moves."""
        return not self.moves and not self.solution.unplaced

    def text(self) -> str:
        """The report, as lines of text."""
        lines = [f"changed: {line}" for line in self.differences] or ["nothing has changed in models, rates or devices"]
        for change, why in self.changes:
            replica = f"{change.workload}[{change.replica}]"
            if change.before and change.after:
                lines.append(f"moves: {replica} from {change.before} to {change.after}: {why}")
            elif change.after:
                lines.append(f"starts: {replica} on {change.after}")
            else:
                lines.append(f"stops: {replica} on {change.before}")
        for entry in self.solution.unplaced:
            lines.append(f"does not fit: {entry.num_replicas} of '{entry.workload}': {entry.why}")
        lines.append(f"cost per hour: {self.cost_before:g} before, {self.cost_after:g} after; {len(self.moves)} moves")
        return "\n".join(lines)


def check_change(before: Problem, placed: Solution, problem: Problem) -> CheckedChange:
    """Find the moves by which the placement of one problem fits another.

    A placement that still fits is kept, even if another costs less.
    """
    solution = replace(placed, unplaced=(), notes=())
    if faults(problem, solution):
        solution = place(problem, placed, keeps=True)
    found = [(change, _why(placed, problem, solution, change)) for change in changes(placed, solution)]
    costs = cost_per_hour(before, placed), cost_per_hour(problem, solution)
    return CheckedChange(solution, list(_differences(before, problem)), found, *costs)


def _why(placed: Solution, problem: Problem, solution: Solution, change: Change) -> str:
    if change.before is None or change.after is None:
        return ""
    stays = Assignment(change.workload, change.replica, change.before)
    own = (workload for workload in problem.workloads if workload.name == change.workload)
    alone = tuple(replace(workload, num_replicas=1, spread=False) for workload in own)
    for fault in faults(replace(problem, workloads=alone), Solution((stays,))):
        if "replicas" not in fault:
            return fault
    names = {workload.name for workload in problem.workloads}
    devices = {device.name for device in problem.devices}
    rest = tuple(entry for entry in placed.assignments if entry.workload in names and entry.bin.device in devices)
    for fault in faults(problem, Solution(rest)):
        is_of_domain = fault.startswith(f"'{change.workload}' has") and "in domain" in fault
        if f"'{change.before}'" in fault or is_of_domain:
            return f"as it was, {fault}"
    back = tuple(entry for entry in solution.assignments if entry[:2] != (change.workload, change.replica))
    put_back = faults(problem, replace(solution, assignments=(*back, stays)))
    return f"its place is taken: {put_back[0]}" if put_back else "makes room, or saves a device, for others"


def _differences(before: Problem, after: Problem) -> Iterator[str]:
    if before.max_load != after.max_load:
        yield f"max_load {before.max_load:g} -> {after.max_load:g}"
    for kind, attribute, told in (("model", "workloads", "num_replicas"), ("device", "devices", "device_class")):
        old, new = ({each.name: each for each in getattr(problem, attribute)} for problem in (before, after))
        for name in sorted({*old, *new}):
            if name not in new:
                yield f"{kind} '{name}' is gone"
            elif name not in old:
                yield f"{kind} '{name}' is new ({told} {getattr(new[name], told)})"
            elif old[name] != new[name]:
                pairs = (
                    (each.name, getattr(old[name], each.name), getattr(new[name], each.name))
                    for each in fields(old[name])
                )
                shown = (f"{field} {_shown(field, a)} -> {_shown(field, b)}" for field, a, b in pairs if a != b)
                yield f"{kind} '{name}': {', '.join(shown)}"


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return gib(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {share:.3g}" for key, share in sorted(value.items())) + "}"
    if name == "mig":
        return "[" + ", ".join(profile.name for profile in value) + "]"
    return str(value)
