"""Outputs of a placement: JSON with its problem, and ``instance_group`` of ``config.pbtxt``."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.base.text.pbtxt_writer import text_of
from weft.capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft.capacity.placement.solution import Assignment, Bin, Solution, Unplaced
from weft.jobs.atomic_files import replace_file
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: Of the format of saved plans; one that is not known is refused.
VERSION = 1
#: A larger file is no plan of ours.
_MAX_BYTES = 64 << 20


def save(path: Path, problem: Problem, solution: Solution) -> None:
    """Write a placement and its problem to a file, atomically. Raises OSError."""
    replace_file(path, (json.dumps(to_json(problem, solution), indent=1) + "\n").encode())


def load(path: Path) -> tuple[Problem, Solution]:
    """Read a file of ``save``.

    Raises:
        InvalidArgumentError: The file is invalid; the message says why, and what to do.
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise InvalidArgumentError(
            f"'{path}' is larger than {_MAX_BYTES} bytes, so it is no plan; name what --save wrote"
        )
    try:
        return from_json(json.loads(content))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidArgumentError(
            f"'{path}' is not a saved plan ({type(error).__name__}: {error}); name a file that 'weft plan --save' wrote"
        ) from None
    except InvalidArgumentError as error:
        raise error.with_message(f"'{path}': {error.message}") from None


def to_json(problem: Problem, solution: Solution) -> dict[str, Any]:
    """Plain values for ``json``."""
    return {
        "version": VERSION,
        "max_load": problem.max_load,
        "workloads": [asdict(workload) | {"load": dict(workload.load)} for workload in problem.workloads],
        "devices": [asdict(device) for device in problem.devices],
        "assignments": [[name, replica, list(bin)] for name, replica, bin in solution.assignments],
        "unplaced": [list(entry) for entry in solution.unplaced],
        "method": "cp-sat",
        "is_optimal": solution.is_optimal,
        "cost_bound": solution.cost_bound,
        "notes": list(solution.notes),
    }


def from_json(values: Any) -> tuple[Problem, Solution]:
    """Inverse of ``to_json``. Raises InvalidArgumentError, or a Python error, for other values."""
    if (version := values["version"]) != VERSION:
        raise InvalidArgumentError(f"its version is {version!r}; this program reads {VERSION}; save the plan again")
    workloads = []  # in older plans with fields that said nothing
    for entry in values["workloads"]:
        of_old = {"cpus", "host_memory_bytes", *(() if entry.get("apart_from") else ("apart_from",))}
        workloads.append(Workload(**{key: value for key, value in entry.items() if key not in of_old}))
    devices = []
    for entry in values["devices"]:
        profiles = (MigProfile(**(profile | {"starts": tuple(profile["starts"])})) for profile in entry["mig"])
        devices.append(Device(**(entry | {"mig": tuple(profiles)})))
    problem = Problem(tuple(workloads), tuple(devices), values["max_load"])
    solution = Solution(
        tuple(Assignment(str(name), int(replica), Bin(*bin)) for name, replica, bin in values["assignments"]),
        tuple(Unplaced(*entry) for entry in values["unplaced"]),
        values["is_optimal"],
        values["cost_bound"],
        tuple(values["notes"]),
    )
    return problem, solution


def instance_groups(problem: Problem, solution: Solution) -> dict[tuple[str, str], str]:
    """The text of ``instance_group`` by host and model.

    ``count`` is the number of instances on each of ``gpus``. A process sees one MIG slice, as GPU 0, so a host with
    slices runs a service for each; equal groups appear once.
    """
    devices = {device.name: device for device in problem.devices}
    held: dict[tuple[str, str], Counter[Bin]] = defaultdict(Counter)
    num_instances = {workload.name: workload.num_instances for workload in problem.workloads}
    for name, _, bin in solution.assignments:
        held[devices[bin.device].on_host, name][bin] += num_instances[name]
    texts = {}
    for key, instances in sorted(held.items()):
        gpus: dict[int, set[int]] = defaultdict(set)  # instances on each -> GPUs
        num_on_cpu = 0
        for bin, number in instances.items():
            index = devices[bin.device].index
            if index is None:
                num_on_cpu += number
            else:
                gpus[number].add(0 if bin.profile else index)
        config = ModelConfig()
        for number in sorted(gpus):
            config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, count=number, gpus=sorted(gpus[number]))
        if num_on_cpu:
            config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=num_on_cpu)
        texts[key] = text_of(config)
    return texts
