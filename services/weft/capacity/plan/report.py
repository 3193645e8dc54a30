"""The report of ``weft plan``: estimates of models on a device, and their placement."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.text.suggestion import suggestion
from weft.capacity.devices.device import DeviceSpec
from weft.capacity.placement import Device, Problem, Solution, Workload, place
from weft.capacity.placement.changes import CheckedChange, check_change
from weft.capacity.placement.fleet import mig_profiles, read_fleet
from weft.capacity.placement.outputs import load
from weft.capacity.placement.problem import MAX_REPLICAS
from weft.capacity.plan.declared import with_declared
from weft.capacity.plan.estimate import Assumptions, Estimate
from weft.capacity.plan.estimates import estimate
from weft.capacity.plan.subjects import Subject, find_models, read_subject, shapes_of
from weft.capacity.plan.target import PlannedDevice, find_target

#: Share of a device's time that is planned for; the rest is for bursts.
_MAX_LOAD = 0.7


@dataclass(frozen=True)
class PlanOptions:
    """What the user asks.

    Attributes:
        repository: Of the models.
        models: Their names; () for all of the model service.
        device: Name of a device, ``"this"``, or a file.
        num_devices: That many of it.
        batch: See ``Assumptions``.
        shapes: ``1x128`` by input.
        declared: ``MIB:MS`` by model, for what cannot be told from files.
        rates: Requests per second by model.
        context, num_output_tokens, cost_per_hour: See ``Assumptions``.
        profile_file: Where figures of this machine are kept; None: the user's cache folder.
        fleet: A file of hosts with such devices, see ``weft.capacity.placement.fleet``; None: ``num_devices`` hosts.
        replicas: The fewest replicas by model.
        max_models: That may share a device or slice; 0: eight, or all if they are more.
        check: A saved plan that is in use.
    """

    repository: Path
    models: tuple[str, ...] = ()
    device: str = "this"
    num_devices: int = 1
    batch: int = 0
    shapes: Mapping[str, str] = field(default_factory=dict)
    declared: Mapping[str, str] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    context: int = 0
    num_output_tokens: int = 128
    cost_per_hour: float = 0.0
    profile_file: Path | None = None
    fleet: Path | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)
    max_models: int = 0
    check: Path | None = None


@dataclass(frozen=True)
class PlanReport:
    """What is known.

    Attributes:
        device: Figures of the device, ``DeviceSpec``.
        estimates: Of each model.
        problem: What was placed, where there was something to place.
        solution: Where it goes.
        checked: What that moves of the plan in use, if one was given.
    """

    device: Any
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
    shapes = shapes_of(options.shapes)
    known = {spec.name for subject in subjects.values() for spec in subject.context.signature.inputs}
    for name in shapes:
        if name.rpartition(".")[2] not in known:
            raise InvalidArgumentError(f"--shape: '{name}' is no input of the planned models{suggestion(name, known)}")
    target = find_target(options.device, options.profile_file, announce)
    assumptions = Assumptions(options.batch, shapes, options.context, options.num_output_tokens, options.cost_per_hour)
    estimates = []
    for name in names:
        one = Estimate(name, "", target.spec.name, 1)
        if (subject := subjects.get(name)) is not None:
            one = Estimate(name, subject.backend, target.spec.name, subject.num_instances)
            try:
                one = estimate(subject, target, assumptions)
            except WeftError as error:
                faults[name] = error
            if name in options.declared:
                faults.pop(name, None)
                one = with_declared(one, options.declared[name], target.spec, options.cost_per_hour)
        estimates.append(replace(one, fault=faults[name].message) if name in faults else one)
    if faults and (len(faults) == len(names) or in_use is not None):
        raise next(iter(faults.values()))
    problem = problem_of(estimates, target, options)
    if problem is None or in_use is None:
        return PlanReport(target.spec, tuple(estimates), problem, None if problem is None else place(problem))
    checked = check_change(*in_use, problem)
    return PlanReport(target.spec, tuple(estimates), problem, checked.solution, checked)


def problem_of(estimates: list[Estimate], target: PlannedDevice, options: PlanOptions) -> Problem | None:
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
