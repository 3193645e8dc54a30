"""Placing: what the solver finds, and why replicas have no place: a cause that holds for sure, else the cures."""

from collections.abc import Iterator
from dataclasses import replace

from weft.capacity.placement.problem import Device, Problem, Workload
from weft.capacity.placement.solution import TOLERANCE, Solution, capacity, gib
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
    """Place every replica; the least cost first, then the fewest moves, then the most even load.

    Args:
        problem: Workloads and devices.
        previous: Where replicas are now, of the same or of another problem.
        time_limit_s: How long the solver may search; the same on every machine, whatever its speed.
        keeps: Fewest moves first, then the least cost.

    Returns:
        A placement that breaks no rule of the problem. Replicas without a place are in ``unplaced``, with the cause.

    Raises:
        UnsupportedError: OR-tools is not installed.
    """
    solution = Search(problem, previous, keeps=keeps).run(time_limit_s)
    workloads = {workload.name: workload for workload in problem.workloads}
    why = {entry.workload: next(_causes(problem, workloads[entry.workload]), "") for entry in solution.unplaced}
    cures = _cures(problem) if not all(why.values()) else []
    explained = (
        entry._replace(why=why[entry.workload] or _left_over(problem, workloads[entry.workload], cures))
        for entry in solution.unplaced
    )
    return replace(solution, unplaced=tuple(explained))


def _causes(problem: Problem, workload: Workload) -> Iterator[str]:
    usable = [device for device in problem.devices if workload.load_on(device.device_class) is not None]
    if not usable:
        wanted, there = sorted(workload.load), sorted({device.device_class for device in problem.devices})
        yield f"it may be on devices of class {_or(wanted)}, and there are only {_or(there)}"
        return
    yield from _too_large(problem, workload, usable)
    if workload.name in workload.apart_from and len(hosts := {d.on_host for d in usable}) < workload.num_replicas:
        yield (
            f"its {workload.num_replicas} replicas must be on different hosts (apart_from), and {len(hosts)} have a "
            "device that it may use; ask for fewer replicas or add hosts"
        )
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
    """Whether an empty device holds a replica; a slice of it never holds more."""
    load = workload.load_on(device.device_class)
    memory_bytes, share = capacity(problem, device, "")
    return load is not None and workload.memory_bytes <= memory_bytes and load <= share + TOLERANCE


def _unspreadable(problem: Problem, workload: Workload) -> Iterator[str]:
    fewest, most = problem.replicas_per_domain(workload)
    alone = replace(
        workload, spread=False, apart_from=workload.apart_from & {workload.name}, num_replicas=max(fewest, 1)
    )
    for domain in problem.domains_of(workload) if fewest else ():
        inside = tuple(device for device in problem.devices if device.in_domain == domain)
        if missing := fewest_missing(replace(problem, workloads=(alone,), devices=inside), _CURE_LIMIT_S):
            yield (
                f"spread puts {fewest} to {most} of its {workload.num_replicas} replicas into each of "
                f"{len(problem.domains_of(workload))} failure domains, and '{domain}' has room for {fewest - missing}, "
                "were it empty; give up spread, ask for fewer replicas, or add a device there"
            )


def _exhausted(problem: Problem) -> Iterator[str]:
    """A sum over all workloads that no placement can hold."""
    memory_bytes = sum(workload.memory_bytes * workload.num_replicas for workload in problem.workloads)
    there = sum(device.memory_bytes for device in problem.devices)
    if memory_bytes > there:
        yield (
            f"all replicas together take {gib(memory_bytes)} and all devices have {gib(there)}: "
            f"{gib(memory_bytes - there)} are missing"
        )
    classes = {device.device_class for device in problem.devices}
    load = sum(
        min((load for name in classes if (load := workload.load_on(name)) is not None), default=0.0)
        * workload.num_replicas
        for workload in problem.workloads
    )
    if load > (most := len(problem.devices) * problem.max_load) + TOLERANCE:
        yield (
            f"all replicas together need the compute of {load:.3g} devices at least, and {len(problem.devices)} "
            f"devices at max_load {problem.max_load:g} give {most:.3g}: {load - most:.3g} are missing"
        )


def _left_over(problem: Problem, workload: Workload, cures: list[str]) -> str:
    """What is left holds no replica; and what would make all replicas of all workloads fit."""
    cause = f"what is left of the devices that it may use does not hold a replica of {gib(workload.memory_bytes)}"
    return "; ".join(filter(None, [cause, *cures, _with_more(problem, workload)]))


def _cures(problem: Problem) -> list[str]:
    """Rules without which everything fits."""
    if problem.num_replicas * len(problem.devices) > _MANY_PAIRS:
        return []
    return [
        f"without {rule} everything fits"
        for rule, other in _relaxations(problem)
        if not fewest_missing(other, _CURE_LIMIT_S)
    ]


def _with_more(problem: Problem, workload: Workload) -> str:
    """How many devices more would do; "" if a few do not."""
    if problem.num_replicas * len(problem.devices) > _MANY_PAIRS:
        return ""
    usable = [device for device in problem.devices if workload.load_on(device.device_class) is not None]
    model = min(usable, key=lambda device: (not _holds(problem, workload, device), device.cost_per_hour))
    there = tuple(replace(device, cost_per_hour=0.0) for device in problem.devices)
    added = tuple(
        replace(model, name=f"{model.name}+{n}", host=f"{model.on_host}+{n}", domain=model.in_domain, cost_per_hour=1.0)
        for n in range(_MAX_ADDED)
    )
    found = Search(replace(problem, devices=(*there, *added))).run(2 * _CURE_LIMIT_S, ("missing", "cost"))
    number = len({device.name for device in added} & set(found.devices))
    return "" if found.unplaced else f"with {number} more of '{model.name}' ({model.device_class}) everything fits"


def _relaxations(problem: Problem) -> Iterator[tuple[str, Problem]]:
    workloads = problem.workloads
    if any(workload.spread for workload in workloads):
        yield "spread", replace(problem, workloads=tuple(replace(entry, spread=False) for entry in workloads))
    if any(workload.apart_from for workload in workloads):
        yield "apart_from", replace(problem, workloads=tuple(replace(w, apart_from=frozenset()) for w in workloads))
    if problem.max_load < 1:
        yield f"max_load {problem.max_load:g} (1 in its place)", replace(problem, max_load=1.0)
    devices = tuple(replace(device, max_models=max(problem.num_replicas, 1)) for device in problem.devices)
    if devices != problem.devices:
        yield "a limit on how many models share a device (max_models)", replace(problem, devices=devices)


def _or(names: list[str]) -> str:
    return " or ".join(f"'{name}'" for name in names)
