"""Devices that are alike: which of them is used makes no difference."""

from collections import defaultdict
from dataclasses import replace
from typing import Any

from weft.capacity.placement.problem import Device, Problem
from weft.capacity.placement.solution import Solution


def alike(problem: Problem, previous: Solution | None) -> list[list[Device]]:
    """Devices in groups within which it makes no difference which one is used."""
    held = set(previous.devices) if previous else set[str]()
    hosts_count = any(workload.apart_from for workload in problem.workloads)
    domains_count = any(workload.spread for workload in problem.workloads)
    groups: dict[Any, list[Device]] = defaultdict(list)
    for device in problem.devices:
        host, domain = device.on_host if hosts_count else "", device.in_domain if domains_count else ""
        kind = replace(device, name="", index=None, host=host, domain=domain)
        groups[device.name if device.name in held else kind].append(device)
    return list(groups.values())


def relabelled(problem: Problem, solution: Solution, previous: Solution | None) -> Solution:
    """A placement with devices that are alike exchanged, so that the first ones of each group are used."""
    used = set(solution.devices)
    name_of: dict[str, str] = {}
    for group in alike(problem, previous):
        ordered = sorted(group, key=lambda device: device.name not in used)
        name_of |= {old.name: new.name for old, new in zip(ordered, group, strict=True)}
    assignments = (
        entry._replace(bin=entry.bin._replace(device=name_of[entry.bin.device])) for entry in solution.assignments
    )
    return replace(solution, assignments=tuple(assignments))
