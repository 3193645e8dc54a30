"""What is placed, and where it can go.

A workload is a model with so many identical replicas; a device holds replicas side by side (they share its compute by
turns), or is partitioned into MIG slices that each hold some. Sizes are of one replica.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.base.errors import InvalidArgumentError

#: In ``Workload.load``: every class of device that is not named.
ANY_CLASS = "*"
#: Above this the search for a placement would not end in a useful time.
MAX_REPLICAS = 5_000
MAX_DEVICES = 2_000
_MAX_BYTES = 1 << 60


@dataclass(frozen=True)
class Workload:
    """A model and its identical replicas.

    Attributes:
        name: Of the model.
        memory_bytes: What one replica takes on its device: weights, activations, caches, and the runtime's own share.
        load: By class of device, the share of one device's compute that a replica needs at its expected rate (0.25: a
            quarter). A class without an entry cannot hold the workload; ``"*"`` stands for every class not named.
        num_replicas: How many are to be placed.
        spread: Whether replicas are spread over failure domains: in any two domains that have devices of a class the
            workload may use, their numbers differ by one at most (Kubernetes' ``maxSkew: 1``).
        apart_from: Workloads of which no replica may be on a host that has one of this; its own name among them: no
            two replicas share a host.
        cpus: CPU cores of a replica's host that it needs, for Kubernetes' requests.
        host_memory_bytes: Memory of the host that a replica needs, likewise.
        num_instances: Of the model, in one replica; ``instance_group`` counts these.
    """

    name: str
    memory_bytes: int
    load: Mapping[str, float]
    num_replicas: int = 1
    spread: bool = False
    apart_from: frozenset[str] = frozenset()
    cpus: float = 1.0
    host_memory_bytes: int = 1 << 30
    num_instances: int = 1

    def load_on(self, device_class: str) -> float | None:
        """The share of such a device's compute that a replica needs; None: it may not be there."""
        return self.load.get(device_class, self.load.get(ANY_CLASS))


@dataclass(frozen=True)
class MigProfile:
    """A kind of slice that a GPU can be partitioned into (NVIDIA's Multi-Instance GPU).

    Attributes:
        name: ``"1g.10gb"``.
        memory_bytes: Usable memory of a slice.
        compute_share: The part of the device's streaming multiprocessors that a slice has, in (0, 1].
        num_slices: Memory slices that it occupies.
        starts: Memory slices at which it may begin.
    """

    name: str
    memory_bytes: int
    compute_share: float
    num_slices: int
    starts: tuple[int, ...]


@dataclass(frozen=True)
class Device:
    """A device that holds replicas.

    Attributes:
        name: Unique.
        device_class: What ``Workload.load`` is given by: ``"H100-80GB"``, ``"cpu"``.
        memory_bytes: What replicas may take together.
        host: The machine that it is in; "": one of its own.
        domain: The failure domain (zone, rack) of the machine; "": its host.
        index: Its number on the host, as ``instance_group.gpus`` names it; None: it is no GPU.
        max_models: Replicas that may share the device, or one of its slices, by turns; 1: each is alone.
        cost_per_hour: What the device costs while anything is on it, in any one currency.
        mig: Slices that it can be partitioned into instead of being used whole; (): none.
    """

    name: str
    device_class: str
    memory_bytes: int
    host: str = ""
    domain: str = ""
    index: int | None = None
    max_models: int = 8
    cost_per_hour: float = 1.0
    mig: tuple[MigProfile, ...] = ()

    @property
    def on_host(self) -> str:
        """The machine that it is in."""
        return self.host or self.name

    @property
    def in_domain(self) -> str:
        """The failure domain of that machine."""
        return self.domain or self.on_host


@dataclass(frozen=True)
class Problem:
    """Workloads to be placed on devices.

    Attributes:
        workloads: With names that differ.
        devices: With names that differ.
        max_load: The share of a device's (or slice's) compute that may be planned for, in (0, 1]; what is left is for
            bursts.

    Raises:
        InvalidArgumentError: A value makes no sense: what it is, what is allowed, what to do.
    """

    workloads: tuple[Workload, ...]
    devices: tuple[Device, ...]
    max_load: float = 1.0

    def __post_init__(self) -> None:
        _check(self)

    @property
    def num_replicas(self) -> int:
        """Of all workloads together."""
        return sum(workload.num_replicas for workload in self.workloads)

    def domains_of(self, workload: Workload) -> list[str]:
        """The failure domains that have devices of a class that the workload may use, sorted."""
        usable = (device for device in self.devices if workload.load_on(device.device_class) is not None)
        return sorted({device.in_domain for device in usable})

    def replicas_per_domain(self, workload: Workload) -> tuple[int, int]:
        """The fewest and most replicas of a spread workload that a failure domain may have."""
        num_domains = max(len(self.domains_of(workload)), 1)
        return workload.num_replicas // num_domains, math.ceil(workload.num_replicas / num_domains)


def _check(problem: Problem) -> None:
    _check_names("workload", [workload.name for workload in problem.workloads])
    _check_names("device", [device.name for device in problem.devices])
    if not problem.devices:
        raise InvalidArgumentError("no device is given, so nothing can be placed; name at least one")
    if len(problem.devices) > MAX_DEVICES:
        raise InvalidArgumentError(f"{len(problem.devices)} devices; at most {MAX_DEVICES}; place them in parts")
    _check_number("max_load", problem.max_load, is_share=True)
    names = {workload.name for workload in problem.workloads}
    for workload in problem.workloads:
        _check_workload(workload, names)
    if problem.num_replicas > MAX_REPLICAS:
        raise InvalidArgumentError(f"{problem.num_replicas} replicas; at most {MAX_REPLICAS}; place them in parts")
    domain_of: dict[str, str] = {}
    for device in problem.devices:
        _check_device(device)
        if (other := domain_of.setdefault(device.on_host, device.in_domain)) != device.in_domain:
            raise InvalidArgumentError(
                f"device '{device.name}' puts host '{device.on_host}' into failure domain '{device.in_domain}', and "
                f"another device of that host into '{other}'; a host is in one domain"
            )


def _check_workload(workload: Workload, names: Iterable[str]) -> None:
    where = f"workload '{workload.name}'"
    for name, highest in (
        ("memory_bytes", _MAX_BYTES),
        ("host_memory_bytes", _MAX_BYTES),
        ("num_replicas", MAX_REPLICAS),
    ):
        _check_int(f"{where}: {name}", getattr(workload, name), 0, highest)
    _check_int(f"{where}: num_instances", workload.num_instances, 1, 1024)
    _check_number(f"{where}: cpus", workload.cpus, 4096.0)
    if not workload.load:
        raise InvalidArgumentError(
            f"{where}: load is empty, so no device may hold it; give the share of a device's compute that a replica "
            f'needs by class of device, {{"*": 0.1}} for any'
        )
    for device_class, share in workload.load.items():
        _check_number(f"{where}: load on '{device_class}'", share, 1e6)
    for other in sorted(workload.apart_from.difference(names)):
        raise InvalidArgumentError(f"{where}: apart_from names '{other}', which is no workload; known: {_some(names)}")


def _check_device(device: Device) -> None:
    where = f"device '{device.name}'"
    _check_int(f"{where}: memory_bytes", device.memory_bytes, 1, _MAX_BYTES)
    _check_int(f"{where}: max_models", device.max_models, 1, MAX_REPLICAS)
    _check_int(f"{where}: index", device.index or 0, 0, 1023)
    _check_number(f"{where}: cost_per_hour", device.cost_per_hour, 1e9)
    if device.device_class in ("", ANY_CLASS):
        raise InvalidArgumentError(f"{where}: device_class is '{device.device_class}'; name one, such as 'cpu'")
    _check_names(f"{where}: MIG profile", [profile.name for profile in device.mig])
    for profile in device.mig:
        _check_int(f"{where}: memory_bytes of '{profile.name}'", profile.memory_bytes, 1, _MAX_BYTES)
        _check_int(f"{where}: num_slices of '{profile.name}'", profile.num_slices, 1, 64)
        _check_number(f"{where}: compute_share of '{profile.name}'", profile.compute_share, is_share=True)
        if not profile.starts:
            raise InvalidArgumentError(f"{where}: MIG profile '{profile.name}' may begin nowhere; give its starts")


def _check_names(what: str, names: Sequence[str]) -> None:
    for name, number in Counter(names).items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"a {what} has the name {name!r}; give it one")
        if number > 1:
            raise InvalidArgumentError(f"{number} {what}s have the name '{name}'; names must differ")


def _check_int(what: str, value: int, lowest: int, highest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= highest:
        raise InvalidArgumentError(f"{what} is {value!r}; allowed: a whole number from {lowest} to {highest}")


def _check_number(what: str, value: float, highest: float = 1.0, *, is_share: bool = False) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= highest or (is_share and value == 0):
        allowed = "above 0, at most 1" if is_share else f"a number from 0 to {highest:g}"
        raise InvalidArgumentError(f"{what} is {value!r}; allowed: {allowed}")


def _some(names: Iterable[str], most: int = 8) -> str:
    shown = sorted(names)
    return ", ".join(f"'{name}'" for name in shown[:most]) + (", ..." if len(shown) > most else "") or "none"
