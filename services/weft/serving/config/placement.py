"""Places the instances of a model on devices, threads or processes, with their shared resources."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.serving.backends.base import InstanceContext
from weft.serving.config.checks import ConfigReport
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.scheduler.rate_limiter import RateLimit
from weft_protos.model_config_pb2 import ModelConfig, ModelInstanceGroup

EXECUTION = "EXECUTION"
#: On the thread of the instance; on the event loop; in a process of the instance's own.
THREAD, INLINE, PROCESS = "thread", "inline", "process"

_PATH = f"parameters[{EXECUTION}].string_value"
_DEVICE = re.compile(r"nvidia\d+")
#: Of one model; each is a thread or a process.
MAX_INSTANCES = 1024


def execution_of(config: ModelConfig, modes: Sequence[str]) -> str:
    """The parameter ``EXECUTION``; if absent, the first of ``modes``, those that the backend allows."""
    return config.parameters[EXECUTION].string_value if EXECUTION in config.parameters else modes[0]


def check_execution(
    config: ModelConfig, settings: SchedulerSettings, modes: Sequence[str], report: ConfigReport
) -> None:
    """Check that the placed model can execute in its configured mode, one of ``modes``."""
    mode = execution_of(config, modes)
    fault = f"parameter '{EXECUTION}' must be {', '.join(modes[:-1])} or {modes[-1]}, got '{mode}'"
    report.refuse(mode not in modes, _PATH, f"model '{config.name}': {fault}")
    groups = config.instance_group
    obstacles = {
        "a decoupled model": config.model_transaction_policy.decoupled,
        "sequence_batching": config.HasField("sequence_batching"),
        "an instance on a GPU": any(group.kind == ModelInstanceGroup.KIND_GPU for group in groups),
        "rate_limiter": any(group.HasField("rate_limiter") for group in groups),
        "execution_timeout_us": settings.execution_timeout_us > 0,
    }
    for obstacle, is_there in obstacles.items():
        fault = f"'{EXECUTION}' inline is not possible with {obstacle}; remove one of them"
        report.refuse(mode == INLINE and is_there, _PATH, fault)


def count_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> int:
    """Number of CUDA devices that this process may use, without a CUDA library.

    They are the device files ``nvidia0``, ``nvidia1``, ... in ``devices``; ``CUDA_VISIBLE_DEVICES`` narrows the choice
    as CUDA reads it: "" and "-1" hide every device.
    """
    present = sum(1 for entry in devices.iterdir() if _DEVICE.fullmatch(entry.name)) if devices.is_dir() else 0
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    asked = [item.strip() for item in visible.split(",")]
    return len(asked[: asked.index("-1")] if "-1" in asked else [item for item in asked if item])


def place_instances(
    config: ModelConfig,
    *,
    num_gpus: int,
    can_use_gpu: bool,
    is_inline: bool = False,
    max_instances: int = MAX_INSTANCES,
    report: ConfigReport,
) -> tuple[InstanceContext, ...]:
    """One context for each instance of ``instance_group``; without a group, one, or one per GPU.

    ``count`` is per GPU of a GPU group, and ``max_instances`` limits all groups together. KIND_AUTO takes the GPUs if
    there are any and the backend can use them; its instances may continue on the CPU, if the library of the backend
    cannot use the GPU. Inline, KIND_AUTO is the CPU. ``config`` gets its default group.
    """
    if not config.instance_group:
        config.instance_group.add()
    instances: list[InstanceContext] = []
    names: set[str] = set()
    for i, group in enumerate(config.instance_group):
        path = f"instance_group[{i}]"
        _check_group(path, group, config.backend, report)
        needs_gpu, is_auto = group.kind == ModelInstanceGroup.KIND_GPU, group.kind == ModelInstanceGroup.KIND_AUTO
        fault = f"backend '{config.backend}' does not run on a GPU; use KIND_CPU"
        report.refuse((needs_gpu or group.gpus) and num_gpus and not can_use_gpu, path, fault)
        fault = "KIND_GPU asked for, but this machine has no GPU that is visible; use KIND_AUTO or KIND_CPU"
        report.refuse(needs_gpu and not num_gpus, f"{path}.kind", fault)
        elsewhere = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL)
        is_gpu = group.kind not in elsewhere and num_gpus > 0 and can_use_gpu
        is_gpu = is_gpu and not (is_inline and is_auto and not group.gpus)
        if is_gpu and not group.gpus:
            group.gpus.extend(range(num_gpus))
        for j, gpu in enumerate(group.gpus):
            fault = f"GPU {gpu} does not exist; this machine has 0 to {num_gpus - 1}"
            report.refuse(is_gpu and not 0 <= gpu < num_gpus, f"{path}.gpus[{j}]", fault)
        group.count = min(max(group.count, 1), MAX_INSTANCES)
        group.name = group.name or f"{config.name}_{i}"
        fault = f"two instance groups are named '{group.name}'; names must differ"
        report.refuse(group.name in names, f"{path}.name", fault)
        names.add(group.name)
        group.kind = ModelInstanceGroup.KIND_GPU if is_gpu else ModelInstanceGroup.KIND_CPU
        if not is_gpu:
            group.ClearField("gpus")
        limit = _rate_limit(f"{path}.rate_limiter", group, report)
        places = [("GPU", gpu) for gpu in group.gpus] or [("CPU", 0)]
        num_instances = len(instances) + len(places) * group.count
        if num_instances > max_instances:
            fault = f"the groups make {num_instances} instances; at most {max_instances} are allowed"
            report.error(f"{path}.count", fault)
            break
        may_use_cpu = is_auto and is_gpu
        instances += [
            InstanceContext(f"{group.name}_{n}", *place, limit, may_use_cpu=may_use_cpu, is_inline=is_inline)
            for n, place in enumerate(place for place in places for _ in range(group.count))
        ]
    return tuple(instances)


def _check_group(path: str, group: ModelInstanceGroup, backend: str, report: ConfigReport) -> None:
    kinds, gpus = ModelInstanceGroup, list(group.gpus)
    for is_fault, field, fault in (
        (group.count < 0, "count", f"count must be at least 1, got {group.count}"),
        (group.count > MAX_INSTANCES, "count", f"count must be at most {MAX_INSTANCES}, got {group.count}"),
        (
            group.kind == kinds.KIND_MODEL and backend != "python",
            "kind",
            f"KIND_MODEL is for Python models, which place themselves, not for '{backend}'; use KIND_AUTO, KIND_CPU or "
            "KIND_GPU",
        ),
        (
            group.kind == kinds.KIND_CPU and gpus,
            "gpus",
            f"gpus {gpus} are given for KIND_CPU; use KIND_GPU or remove gpus",
        ),
        (len(set(gpus)) != len(gpus), "gpus", f"gpus {gpus} name a GPU twice; for more instances raise count"),
        (group.passive, "passive", "instance_group passive is not supported by this version; remove it"),
        (
            group.secondary_devices,
            "secondary_devices",
            "instance_group secondary_devices is not supported by this version; remove it",
        ),
    ):
        report.refuse(is_fault, f"{path}.{field}", fault)


def _rate_limit(path: str, group: ModelInstanceGroup, report: ConfigReport) -> RateLimit | None:
    if not group.HasField("rate_limiter"):
        return None
    scoped: dict[bool, dict[str, int]] = {False: {}, True: {}}
    names: set[str] = set()
    for i, resource in enumerate(group.rate_limiter.resources):
        called, name = f"{path}.resources[{i}]", resource.name
        report.refuse(not name, called, "a resource must specify 'name'")
        report.refuse(not resource.count, called, f"resource '{name}' must specify a count of at least 1, got 0")
        fault = f"resource '{name}' is named twice; add the counts up in one"
        report.refuse(name in names, f"{called}.name", fault)
        names.add(name)
        scoped[getattr(resource, "global")][name] = resource.count
    return RateLimit(max(group.rate_limiter.priority, 1), tuple(scoped[False].items()), tuple(scoped[True].items()))
