"""What differs between two placements: which replicas move from where to where and why, come or go."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import zip_longest
from typing import Any, NamedTuple

from weft.capacity.placement.place import place
from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import Assignment, Bin, Solution, by_workload, cost_per_hour, faults, gib


class Change(NamedTuple):
    """A replica that is somewhere else than before.

    Attributes:
        workload, replica: Which one.
        before: Where it was; None: it is new.
        after: Where it is; None: it is gone.
    """

    workload: str
    replica: int
    before: Bin | None
    after: Bin | None


def changes(previous: Solution | None, solution: Solution) -> list[Change]:
    """What a new placement changes, by workload and replica. Without one before it, every replica is new.

    Replicas of a workload are alike, so that one which is where any was has not moved.
    """
    found: list[Change] = []
    before, after = by_workload(previous), by_workload(solution)
    for name in sorted({*before, *after}):
        old, new = before.get(name, {}), after.get(name, {})
        stay = Counter(old.values()) & Counter(new.values())
        ways = zip_longest(_without(old, stay), _without(new, stay), fillvalue=None)
        for was, will_be in ways:
            replica = (will_be or was or (0, None))[0]
            found.append(Change(name, replica, was[1] if was else None, will_be[1] if will_be else None))
    return found


def num_moved(previous: Solution | None, solution: Solution) -> int:
    """How many replicas are neither where one of their workload was nor new."""
    if previous is None:
        return 0
    before, after = by_workload(previous), by_workload(solution)
    return sum(
        min(len(before[name]), len(after[name]))
        - min((Counter(before[name].values()) & Counter(after[name].values())).total(), len(after[name]))
        for name in before.keys() & after.keys()
    )


def _without(replicas: Mapping[int, Bin], stay: Counter[Bin]) -> list[tuple[int, Bin]]:
    """The replicas but for those that stay."""
    left, rest = Counter(stay), []
    for replica, bin in sorted(replicas.items()):
        if left[bin] > 0:
            left[bin] -= 1
        else:
            rest.append((replica, bin))
    return rest


class CheckedChange(NamedTuple):
    """What has changed, and what it moves.

    Attributes:
        solution: The placement after the change, with as few moves as were found.
        differences: What is another in the workloads and devices, in words.
        changes: Replicas that move, come or go, each with the cause.
        cost_before, cost_after: Per hour.
    """

    solution: Solution
    differences: list[str]
    changes: list[tuple[Change, str]]
    cost_before: float
    cost_after: float

    @property
    def moves(self) -> list[tuple[Change, str]]:
        """The replicas that are to be stopped in one place and started in another."""
        return [entry for entry in self.changes if entry[0].before and entry[0].after]

    @property
    def is_unmoved(self) -> bool:
        """Whether everything has a place and nothing moves."""
        return not self.moves and not self.solution.unplaced

    def text(self) -> str:
        """All of it in lines."""
        lines = [f"changed: {line}" for line in self.differences] or ["nothing has changed in models, rates or devices"]
        for change, why in self.changes:
            replica = f"{change.workload}[{change.replica}]"
            if change.before and change.after:
                lines.append(f"moves: {replica} from {change.before} to {change.after}: {why}")
            else:
                lines.append(
                    f"starts: {replica} on {change.after}" if change.after else f"stops: {replica} on {change.before}"
                )
        lines += [
            f"does not fit: {entry.num_replicas} of '{entry.workload}': {entry.why}" for entry in self.solution.unplaced
        ]
        lines.append(f"cost per hour: {self.cost_before:g} before, {self.cost_after:g} after; {len(self.moves)} moves")
        return "\n".join(lines)


def check_change(before: Problem, placed: Solution, problem: Problem) -> CheckedChange:
    """What is to be done so that the placement of one problem fits another.

    A placement that still holds stays, even if another one costs less.
    """
    solution = replace(placed, unplaced=(), notes=())
    if faults(problem, solution):
        solution = place(problem, placed, keeps=True)
    found = [(change, _why(before, placed, problem, solution, change)) for change in changes(placed, solution)]
    return CheckedChange(
        solution,
        list(_differences(before, problem)),
        found,
        cost_per_hour(before, placed),
        cost_per_hour(problem, solution),
    )


def _why(before: Problem, placed: Solution, problem: Problem, solution: Solution, change: Change) -> str:
    if change.before is None or change.after is None:
        return ""
    stays = [Assignment(change.workload, change.replica, change.before)]
    alone = faults(replace(problem, workloads=_only(problem, change.workload)), Solution(tuple(stays)))
    if broken := [fault for fault in alone if "replicas" not in fault]:
        return broken[0]
    names = {workload.name for workload in problem.workloads}
    devices = {device.name for device in problem.devices}
    rest = tuple(entry for entry in placed.assignments if entry.workload in names and entry.bin.device in devices)
    concerned = [fault for fault in faults(problem, Solution(rest)) if _concerns(fault, change.before, change.workload)]
    if concerned:
        return f"as it was, {concerned[0]}"
    back = tuple(entry for entry in solution.assignments if entry[:2] != (change.workload, change.replica))
    put_back = faults(problem, replace(solution, assignments=(*back, *stays)))
    return f"its place is taken: {put_back[0]}" if put_back else "makes room, or saves a device, for others"


def _only(problem: Problem, name: str) -> tuple[Workload, ...]:
    return tuple(
        replace(workload, num_replicas=1, spread=False, apart_from=frozenset())
        for workload in problem.workloads
        if workload.name == name
    )


def _concerns(fault: str, bin: Bin, workload: str) -> bool:
    return f"'{bin}'" in fault or (fault.startswith(f"'{workload}' has") and "in domain" in fault)


def _differences(before: Problem, after: Problem) -> Iterator[str]:
    if before.max_load != after.max_load:
        yield f"max_load {before.max_load:g} -> {after.max_load:g}"
    yield from _of_kind(
        "model", {w.name: w for w in before.workloads}, {w.name: w for w in after.workloads}, "num_replicas"
    )
    yield from _of_kind(
        "device", {d.name: d for d in before.devices}, {d.name: d for d in after.devices}, "device_class"
    )


def _of_kind(kind: str, old: Mapping[str, Any], new: Mapping[str, Any], told: str) -> Iterator[str]:
    for name in sorted({*old, *new}):
        if name not in new:
            yield f"{kind} '{name}' is gone"
        elif name not in old:
            yield f"{kind} '{name}' is new ({told} {getattr(new[name], told)})"
        elif old[name] != new[name]:
            yield f"{kind} '{name}': {', '.join(_fields(old[name], new[name]))}"


def _fields(old: Workload | Device, new: Workload | Device) -> Iterator[str]:
    for field in fields(old):
        before, after = getattr(old, field.name), getattr(new, field.name)
        if before != after:
            yield f"{field.name} {_shown(field.name, before)} -> {_shown(field.name, after)}"


def _shown(name: str, value: Any) -> str:
    if name.endswith("_bytes"):
        return gib(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {share:.3g}" for key, share in sorted(value.items())) + "}"
    if name == "mig":
        return "[" + ", ".join(profile.name for profile in value) + "]"
    return ",".join(sorted(value)) if isinstance(value, frozenset) else str(value)
