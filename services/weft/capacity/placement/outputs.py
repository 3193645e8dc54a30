"""A placement as files and text: saved with its problem as JSON, and as ``instance_group`` of ``config.pbtxt``."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from google.protobuf import text_format

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement.problem import Device, MigProfile, Problem, Workload
from weft.capacity.placement.solution import Assignment, Bin, Solution, Unplaced
from weft.jobs.atomic_files import replace_file
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

#: Of the format; one that is not known is refused.
VERSION = 1
#: A larger file is none of ours.
_MAX_BYTES = 64 << 20


def save(path: Path, problem: Problem, solution: Solution) -> None:
    """Write a placement and what was placed; the file is never half written.

    Raises:
        OSError: It cannot be written.
    """
    replace_file(path, (json.dumps(to_json(problem, solution), indent=1) + "\n").encode())


def load(path: Path) -> tuple[Problem, Solution]:
    """Read what ``save`` wrote.

    Raises:
        InvalidArgumentError: It is no such file: what is wrong, and what to do.
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
    workloads = [
        asdict(workload) | {"load": dict(workload.load), "apart_from": sorted(workload.apart_from)}
        for workload in problem.workloads
    ]
    return {
        "version": VERSION,
        "max_load": problem.max_load,
        "workloads": workloads,
        "devices": [asdict(device) for device in problem.devices],
        "assignments": [[name, replica, list(bin)] for name, replica, bin in solution.assignments],
        "unplaced": [list(entry) for entry in solution.unplaced],
        "method": "cp-sat",
        "is_optimal": solution.is_optimal,
        "cost_bound": solution.cost_bound,
        "notes": list(solution.notes),
    }


def from_json(values: Any) -> tuple[Problem, Solution]:
    """What ``to_json`` made.

    Raises:
        InvalidArgumentError, KeyError, TypeError, ValueError, AttributeError: It made nothing like this.
    """
    if (version := values["version"]) != VERSION:
        raise InvalidArgumentError(f"its version is {version!r}; this program reads {VERSION}; save the plan again")
    workloads = tuple(
        Workload(**(entry | {"apart_from": frozenset(entry["apart_from"])})) for entry in values["workloads"]
    )
    devices = tuple(Device(**(entry | {"mig": tuple(map(_profile, entry["mig"]))})) for entry in values["devices"])
    problem = Problem(workloads, devices, values["max_load"])
    solution = Solution(
        tuple(Assignment(str(name), int(replica), Bin(*bin)) for name, replica, bin in values["assignments"]),
        tuple(Unplaced(*entry) for entry in values["unplaced"]),
        values["is_optimal"],
        values["cost_bound"],
        tuple(values["notes"]),
    )
    return problem, solution


def _profile(entry: dict[str, Any]) -> MigProfile:
    return MigProfile(**(entry | {"starts": tuple(entry["starts"])}))


def instance_groups(problem: Problem, solution: Solution) -> dict[tuple[str, str], str]:
    """The text of ``instance_group`` by host and model.

    ``count`` is the number of instances on each of ``gpus``. A process sees one MIG slice, as GPU 0, so that a host
    with slices runs a service for each; what is the same in all of them is there once.

    Raises:
        KeyError: The placement is of another problem.
    """
    devices = {device.name: device for device in problem.devices}
    held: dict[tuple[str, str], Counter[Bin]] = defaultdict(Counter)
    num_instances = {workload.name: workload.num_instances for workload in problem.workloads}
    for name, _, bin in solution.assignments:
        held[devices[bin.device].on_host, name][bin] += num_instances[name]
    return {key: _groups_text(counter, devices) for key, counter in sorted(held.items())}


def _groups_text(instances: Counter[Bin], devices: dict[str, Device]) -> str:
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
    return text_format.MessageToString(config)
