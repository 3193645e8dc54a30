"""The report of ``weft plan``: estimates of models on a device, their placement, and both as files and values."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.text.suggestion import suggestion
from weft.capacity.devices import DeviceSpec
from weft.capacity.placement import Device, Problem, Solution, Workload, place
from weft.capacity.placement.changes import CheckedChange, check_change
from weft.capacity.placement.fleet import mig_profiles, read_fleet
from weft.capacity.placement.kubernetes import kubernetes_text
from weft.capacity.placement.outputs import instance_groups, load, save, to_json
from weft.capacity.placement.problem import MAX_REPLICAS
from weft.capacity.plan.estimates import Estimate, PlanOptions, estimate, with_declared
from weft.capacity.plan.subjects import Subject, find_models, read_subject
from weft.capacity.plan.target import DeviceTarget, find_target
from weft.jobs.atomic_files import replace_file

#: Share of a device's time that is planned for; the rest is for bursts.
_MAX_LOAD = 0.7


@dataclass(frozen=True)
class PlanReport:
    """What is known.

    Attributes:
        device: Its figures.
        estimates: Of each model.
        problem: What was placed, where there was something to place.
        solution: Where it goes.
        checked: What that moves of the plan in use, if one was given.
    """

    device: DeviceSpec
    estimates: tuple[Estimate, ...]
    problem: Problem | None
    solution: Solution | None
    checked: CheckedChange | None = None

    @property
    def fault(self) -> str:
        """Why the first model that could not be estimated is not; "": all were."""
        return next((each.fault for each in self.estimates if each.fault), "")

    @property
    def fits(self) -> bool:
        """Whether every model is known and fits, every replica has a place, and none that is in use moves."""
        return (
            not self.fault
            and not any(each.missing_bytes for each in self.estimates)
            and not (self.solution is not None and self.solution.unplaced)
            and (self.checked is None or self.checked.is_unmoved)
        )


def make_report(options: PlanOptions, announce: Callable[[str], None] = lambda _: None) -> PlanReport:
    """Estimate and place. Of several models one that cannot be estimated is told with its cause, and left out.

    Args:
        options: What is asked.
        announce: Called with a sentence before something takes long.

    Raises:
        WeftError: A model, device, shape or number is not known or wrong; the message gives the cure. No model can be
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
    for option, given in (
        ("--rate", options.rates),
        ("--declare", options.declared),
        ("--replicas", options.replicas),
    ):
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
    """Workloads of the models that are known, and the devices; None where nothing is known."""
    spec = target.spec
    known = [each for each in estimates if each.memory is not None]
    if not known:
        return None
    runtime = max(each.memory.runtime for each in known if each.memory is not None)
    mig = mig_profiles(spec.name, runtime)
    device = Device(
        spec.name,
        spec.name,
        max(spec.memory_bytes - runtime, 1),
        index=None if spec.is_cpu else 0,
        max_models=options.max_models or max(len(known), 8),
        cost_per_hour=options.cost_per_hour or 1.0,
    )
    if options.fleet is not None:
        devices = read_fleet(options.fleet, device, mig)
    else:
        devices = tuple(
            replace(device, name=f"{spec.name}-{index}", host=f"host-{index}", mig=mig)
            for index in range(options.num_devices)
        )
    num_domains = len({entry.in_domain for entry in devices})
    workloads = tuple(
        _workload(each, spec, options.rates.get(each.model, 0.0), options.replicas.get(each.model, 1), num_domains)
        for each in known
    )
    return Problem(workloads, devices, _MAX_LOAD)


def _workload(each: Estimate, spec: DeviceSpec, rate: float, least: int, num_domains: int) -> Workload:
    """Replicas for a rate; on a CPU each core runs an instance at a time."""
    assert each.memory is not None  # noqa: S101  # the caller's choice
    device_per_s = each.requests_per_s * max(spec.num_cores, 1)
    busy = rate / device_per_s if device_per_s else 0.0
    num_replicas = max(math.ceil(busy / _MAX_LOAD - 1e-9), least)
    if num_replicas > MAX_REPLICAS:
        raise InvalidArgumentError(
            f"'{each.model}' is to have {num_replicas} replicas; at most {MAX_REPLICAS} can be planned: give a "
            "lower --rate or --replicas"
        )
    return Workload(
        each.model,
        each.memory.own,
        {spec.name: busy / num_replicas},
        num_replicas=num_replicas,
        spread=num_replicas > 1 and num_domains > 1,
        host_memory_bytes=max(each.memory.runtime, 1),
        num_instances=each.num_instances,
    )


def write_outputs(report: PlanReport, saved: Path | None, kubernetes: Path | None) -> list[Path]:
    """Write the files that are asked for; returns them.

    Raises:
        InvalidArgumentError: A model could not be estimated, or none was placed, so there is nothing to write; or a
            folder is named, not a file.
        OSError: A file cannot be written.
    """
    if (saved or kubernetes) and report.fault:
        raise InvalidArgumentError(f"the plan lacks a model, so nothing is written: {report.fault}")
    if (saved or kubernetes) and (report.problem is None or report.solution is None):
        raise InvalidArgumentError("no model could be placed, so nothing is written; declare its needs with --declare")
    for path in filter(None, (saved, kubernetes)):
        if path.is_dir():
            raise InvalidArgumentError(f"'{path}' is a folder; name a file to be written")
    written = []
    if saved and report.problem and report.solution:
        save(saved, report.problem, report.solution)
        written.append(saved)
    if kubernetes and report.problem and report.solution:
        replace_file(kubernetes, kubernetes_text(report.problem, report.solution).encode())
        written.append(kubernetes)
    return written


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
