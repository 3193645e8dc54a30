"""``weft plan``: estimates models on a device, places them, and renders both as text, values and files."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.text.suggestion import suggestion
from weft.capacity.devices import DeviceSpec
from weft.capacity.estimates import Estimate, PlanOptions, estimate, with_declared
from weft.capacity.placement import Device, Problem, Solution, Workload, place
from weft.capacity.placement.outputs import instance_groups, load, save, to_json
from weft.capacity.placement.place import CheckedChange, check_change
from weft.capacity.placement.problem import MAX_REPLICAS, mig_profiles, read_fleet
from weft.capacity.roofline import DeviceTarget, Timing, find_target
from weft.capacity.subjects import Subject, find_models, read_subject

#: Share of a device's time that is planned for; the rest is for bursts.
_MAX_LOAD = 0.7
_MIB = 2**20
_HEADER = [
    "model", "x", "weights", "activ.", "arena", "KV", "runtime", "total MiB", "batch 1", "largest", "bound by", "ridge",
    "fits", "per second", "per million",
]  # fmt: skip


@dataclass(frozen=True)
class PlanReport:
    """The result of a plan.

    Attributes:
        problem, solution: The placement problem and its solution, if there was something to place.
        checked: The moves from the plan in use, if one was given.
    """

    device: DeviceSpec
    estimates: tuple[Estimate, ...]
    problem: Problem | None
    solution: Solution | None
    checked: CheckedChange | None = None

    @property
    def fault(self) -> str:
        """The first error of an estimate; "" if there is none."""
        return next((each.fault for each in self.estimates if each.fault), "")

    @property
    def fits(self) -> bool:
        """Whether every model is known and fits, every replica has a place, and none in use moves."""
        return (
            not self.fault
            and not any(each.missing_bytes for each in self.estimates)
            and not (self.solution is not None and self.solution.unplaced)
            and (self.checked is None or self.checked.is_unmoved)
        )


def make_report(options: PlanOptions, announce: Callable[[str], None] = lambda _: None) -> PlanReport:
    """Estimate and place. Of several models, those that cannot be estimated are reported and left out.

    Args:
        announce: Called with a sentence before something takes long.

    Raises:
        WeftError: A model, device, shape or number is unknown or wrong; the message gives the cure. No model can be
            estimated; or one cannot, and a plan in use is to be checked.
    """
    subjects: dict[str, Subject] = {}
    faults: dict[str, WeftError] = {}
    names = find_models(options.repository, options.models)
    for name, (service, folder) in names.items():
        try:
            subjects[name] = read_subject(service, folder)
        except WeftError as error:
            faults[name] = error
    if names and not subjects:
        raise next(iter(faults.values()))
    in_use = None if options.check is None else load(options.check)
    by_option = {"--rate": options.rates, "--declare": options.declared, "--replicas": options.replicas}
    for option, given in by_option.items():
        for name in given:
            if name not in names:
                raise InvalidArgumentError(f"{option}: '{name}' is none of the planned models{suggestion(name, names)}")
    known = {spec.name for subject in subjects.values() for spec in subject.context.signature.inputs}
    for name in options.shapes:
        if name.rpartition(".")[2] not in known:
            raise InvalidArgumentError(f"--shape: '{name}' is no input of the planned models{suggestion(name, known)}")
    target = find_target(options.device, options.profile_file, announce)
    estimates = []
    for name in names:
        one = Estimate(name, "", target.spec.name, 1)
        if (subject := subjects.get(name)) is not None:
            one = Estimate(name, subject.backend, target.spec.name, subject.num_instances)
            try:
                one = estimate(subject, target, options)
            except WeftError as error:
                faults[name] = error
            if name in options.declared:
                faults.pop(name, None)
                one = with_declared(one, options.declared[name], target.spec, options.cost_per_hour)
        estimates.append(replace(one, fault=faults[name].message) if name in faults else one)
    if faults and (len(faults) == len(names) or in_use is not None):
        raise next(iter(faults.values()))
    problem = _problem_of(estimates, target, options)
    if problem is None or in_use is None:
        return PlanReport(target.spec, tuple(estimates), problem, None if problem is None else place(problem))
    checked = check_change(*in_use, problem)
    return PlanReport(target.spec, tuple(estimates), problem, checked.solution, checked)


def _problem_of(estimates: list[Estimate], target: DeviceTarget, options: PlanOptions) -> Problem | None:
    """Placement problem of the known models and devices; None if nothing is known."""
    spec = target.spec
    memories = [each.memory for each in estimates if each.memory is not None]
    if not memories:
        return None
    runtime = max(memory.runtime for memory in memories)
    mig = mig_profiles(spec.name, runtime)
    device = Device(
        spec.name,
        spec.name,
        max(spec.memory_bytes - runtime, 1),
        index=None if spec.is_cpu else 0,
        max_models=options.max_models or max(len(memories), 8),
        cost_per_hour=options.cost_per_hour or 1.0,
    )
    if options.fleet is not None:
        devices = read_fleet(options.fleet, device, mig)
    else:
        together = 1 if spec.is_cpu else max(each.num_ranks for each in estimates)
        devices = tuple(
            replace(
                device,
                name=f"{spec.name}-{number}",
                host=f"host-{number // together}",
                index=None if spec.is_cpu else number % together,
                mig=mig,
            )
            for number in range(options.num_devices)
        )
    num_domains = len({entry.in_domain for entry in devices})
    workloads = []
    for each in estimates:
        if each.memory is None:
            continue
        num_cores = max(spec.num_cores // each.num_ranks, 1)  # on a CPU each core runs an instance, or rank, at a time
        device_per_s = each.requests_per_s * num_cores
        busy = options.rates.get(each.model, 0.0) / device_per_s if device_per_s else 0.0
        num_replicas = max(math.ceil(busy / _MAX_LOAD - 1e-9), options.replicas.get(each.model, 1))
        if num_replicas > MAX_REPLICAS:
            raise InvalidArgumentError(
                f"'{each.model}' is to have {num_replicas} replicas; at most {MAX_REPLICAS} can be planned: give a "
                "lower --rate or --replicas"
            )
        workloads.append(
            Workload(
                each.model,
                each.memory.own * (each.num_ranks if spec.is_cpu else 1),
                {spec.name: busy / num_replicas},
                num_replicas=num_replicas,
                spread=num_replicas > 1 and num_domains > 1,
                num_instances=each.num_instances,
                num_devices=1 if spec.is_cpu else each.num_ranks,
            )
        )
    return Problem(tuple(workloads), devices, _MAX_LOAD)


def write_output(report: PlanReport, saved: Path) -> None:
    """Write the plan to a file.

    Raises:
        InvalidArgumentError: A model could not be estimated, or none was placed, so there is nothing to write; or a
            folder is named, not a file.
        OSError: The file cannot be written.
    """
    if report.fault:
        raise InvalidArgumentError(f"the plan lacks a model, so nothing is written: {report.fault}")
    if report.problem is None or report.solution is None:
        raise InvalidArgumentError("no model could be placed, so nothing is written; declare its needs with --declare")
    if saved.is_dir():
        raise InvalidArgumentError(f"'{saved}' is a folder; name a file to be written")
    save(saved, report.problem, report.solution)


def render_instance_groups(report: PlanReport) -> str:
    """The text for each host and model, with a line that names them."""
    if report.problem is None or report.solution is None:
        return ""
    groups = instance_groups(report.problem, report.solution)
    return "\n".join(f"# {model} on {host}\n{text}" for (host, model), text in groups.items()).rstrip()


def plan_values(report: PlanReport) -> dict[str, Any]:
    """Plain values for ``json``."""
    values: dict[str, Any] = {"device": asdict(report.device), "estimates": [asdict(each) for each in report.estimates]}
    if report.problem is not None and report.solution is not None:
        values["placement"] = to_json(report.problem, report.solution)
    if report.checked is not None:
        values["change"] = {
            "differences": report.checked.differences,
            "changes": [
                {
                    "model": change.workload,
                    "replica": change.replica,
                    "from": None if change.before is None else str(change.before),
                    "to": None if change.after is None else str(change.after),
                    "why": why,
                }
                for change, why in report.checked.changes
            ],
            "cost_per_hour_before": report.checked.cost_before,
            "cost_per_hour_after": report.checked.cost_after,
        }
    return values


def render_report(report: PlanReport) -> str:
    """The device, a line for each model, and their places."""
    spec = report.device
    peaks = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in spec.flops_per_s.items())
    text = [
        f"{spec.name}: {spec.memory_bytes / 1e9:.1f} GB, {spec.bytes_per_s / 1e9:.0f} GB/s, TFLOP/s: {peaks} "
        f"({spec.source}, {spec.read})",
        "",
    ]
    lines = [_HEADER, *(_cells(each) for each in report.estimates)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for first, *others in lines:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        text.append("  ".join(cells).rstrip())
    for each in report.estimates:
        if each.missing_bytes:
            text.append(
                f"{each.model} does not fit into {each.device}: {each.missing_bytes / _MIB:.0f} MiB are missing"
            )
        text += [f"{each.model}: {note}" for note in each.notes]
        if each.fault:
            text.append(f"{each.model} is not planned: {each.fault}")
    if report.solution is not None and report.problem is not None:
        text += ["", "placement", *(f"  {line}" for line in _placement_lines(report.problem, report.solution))]
    if report.checked is not None:
        text += ["", "change", *(f"  {line}" for line in report.checked.text().splitlines())]
    return "\n".join(text)


def _placement_lines(problem: Problem, solution: Solution) -> Iterator[str]:
    held: dict[str, list[str]] = {device.name: [] for device in problem.devices}
    workloads = {workload.name: workload for workload in problem.workloads}
    for name, _, bin in solution.assignments:
        together = problem.devices_of(workloads[name], problem.by_name[bin.device])
        for rank, device in enumerate(together):
            which = f" (rank {rank})" if len(together) > 1 else ""
            held[device.name].append(f"{bin._replace(device=device.name)}: {name}{which}")
    for device_name, lines in held.items():
        yield from lines or [f"{device_name}: nothing"]
    for entry in solution.unplaced:
        yield f"no place for {entry.num_replicas} of {entry.workload}: {entry.why}"
    yield from solution.notes


def _cells(each: Estimate) -> list[str]:
    memory = each.memory
    sizes = (
        ["-"] * 6
        if memory is None
        else [
            f"{size / _MIB:.1f}" if size < 100 * _MIB else f"{size / _MIB:.0f}"
            for size in (memory.weights, memory.activations, memory.arena, memory.kv, memory.runtime, memory.total)
        ]
    )
    fits = f"{each.largest_batch} rows" if each.largest_batch or each.missing_bytes else "-"
    if each.unit == "tokens":
        fits = f"{each.largest_batch} x {each.context}, {each.largest_context} alone"
    bounds = [timing.bound for timing in (each.time_1, each.time_max) if timing is not None]
    return [
        each.model,
        str(each.num_instances),
        *sizes,
        _time(each.time_1),
        f"{each.max_batch}: {_time(each.time_max)}" if each.time_max else "-",
        ", ".join(dict.fromkeys(bounds)) or "-",
        "-" if each.ridge_batch is None else str(each.ridge_batch),
        fits,
        f"{each.rate_per_s:.3g} {each.unit}" if each.rate_per_s else "-",
        "-" if each.cost_per_million is None else f"{each.cost_per_million:.3g}",
    ]


def _time(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    return f"{timing.seconds * 1e3:.3g} ms"
