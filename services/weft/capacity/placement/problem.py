"""Placement problems: workloads, devices and their slices; and the file of hosts.

A workload is a model with identical replicas. A device holds replicas side by side, which take turns on its compute, or
is partitioned into MIG slices that each hold some. A file of hosts::

    [[host]]
    name = "gpu-a"
    domain = "zone-a"       # failure domain; default: the host
    num_devices = 8         # default: 1
    max_models = 4          # that share a device or slice; default: that of the caller
    cost_per_hour = 2.5     # of a device; default: that of the caller
    mig = true              # whether its GPUs can be partitioned; default: false
"""

import math
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError

#: In ``Workload.load``: every class of device that is not named.
ANY_CLASS = "*"
#: Above this the search for a placement would not end in a useful time.
MAX_REPLICAS = 5_000
MAX_DEVICES = 2_000
_MAX_BYTES = 1 << 60
_MAX_FILE_BYTES = 1 << 20
_HOST_FIELDS = {"name": str, "domain": str, "num_devices": int, "max_models": int, "cost_per_hour": float, "mig": bool}


@dataclass(frozen=True)
class Workload:
    """A model and its identical replicas; sizes are of one replica, on each of its devices.

    Attributes:
        memory_bytes: On its device: weights, activations, caches, and the runtime's own share.
        load: By class of device, the share of one device's compute that a replica needs at its expected rate (0.25: a
            quarter). A class without an entry cannot hold the workload; ``"*"`` stands for every other class.
        spread: Whether the numbers of replicas in any two failure domains with usable devices differ by one at most
            (Kubernetes' ``maxSkew: 1``).
        num_instances: Of the model, in one replica; for ``instance_group``.
        num_devices: That a replica's ranks take, next to one another on a host; none of them as a slice.
    """

    name: str
    memory_bytes: int
    load: Mapping[str, float]
    num_replicas: int = 1
    spread: bool = False
    num_instances: int = 1
    num_devices: int = 1

    def load_on(self, device_class: str) -> float | None:
        """The share of such a device's compute that a replica needs; None: it cannot use the device."""
        return self.load.get(device_class, self.load.get(ANY_CLASS))


@dataclass(frozen=True)
class MigProfile:
    """A kind of slice that a GPU can be partitioned into (NVIDIA's Multi-Instance GPU).

    Attributes:
        name: ``"1g.10gb"``.
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
        device_class: Key of ``Workload.load``: ``"H100-80GB"``, ``"cpu"``.
        memory_bytes: Memory for replicas.
        host: Its machine; "": one of its own.
        domain: The failure domain (zone, rack) of the machine; "": its host.
        index: Its number on the host, for ``instance_group.gpus``; None: it is no GPU.
        max_models: Replicas that may share the device, or one of its slices, by turns; 1: each is alone.
        cost_per_hour: While anything is on it, in any one currency.
        mig: Slices that it can be partitioned into; (): none.
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
        """Its machine."""
        return self.host or self.name

    @property
    def in_domain(self) -> str:
        """The failure domain of its machine."""
        return self.domain or self.on_host


@dataclass(frozen=True)
class Problem:
    """Workloads to be placed on devices.

    Attributes:
        max_load: Share of a device's (or slice's) compute that may be planned for, in (0, 1]; the rest is for bursts.

    Raises:
        InvalidArgumentError: A value is invalid; the message has it, the allowed values and the cure.
    """

    workloads: tuple[Workload, ...]
    devices: tuple[Device, ...]
    max_load: float = 1.0

    def __post_init__(self) -> None:
        _check_names("workload", [workload.name for workload in self.workloads])
        _check_names("device", [device.name for device in self.devices])
        if not self.devices:
            raise InvalidArgumentError("no device is given, so nothing can be placed; name at least one")
        if len(self.devices) > MAX_DEVICES:
            raise InvalidArgumentError(f"{len(self.devices)} devices; at most {MAX_DEVICES}; place them in parts")
        _check_share("max_load", self.max_load)
        for workload in self.workloads:
            _check_workload(workload)
        if self.num_replicas > MAX_REPLICAS:
            raise InvalidArgumentError(f"{self.num_replicas} replicas; at most {MAX_REPLICAS}; place them in parts")
        domain_of: dict[str, str] = {}
        for device in self.devices:
            _check_device(device)
            if (other := domain_of.setdefault(device.on_host, device.in_domain)) != device.in_domain:
                raise InvalidArgumentError(
                    f"device '{device.name}' puts host '{device.on_host}' into failure domain '{device.in_domain}', "
                    f"and another device of that host into '{other}'; a host is in one domain"
                )

    @property
    def num_replicas(self) -> int:
        """Total number of replicas of all workloads."""
        return sum(workload.num_replicas for workload in self.workloads)

    def usable(self, workload: Workload) -> list[Device]:
        """The devices that the workload may use; of several that a replica takes, the first."""
        return [device for device in self.devices if self.devices_of(workload, device)[:1] == (device,)]

    def devices_of(self, workload: Workload, device: Device) -> tuple[Device, ...]:
        """The devices of a replica that has ``device`` among them; () if none may have it.

        Several begin at a multiple of their number, so that different models do not leave single devices between them.
        """
        if workload.num_devices == 1:
            found: tuple[Device, ...] = (device,)
        else:
            first = self._places[device.name] // workload.num_devices * workload.num_devices
            found = self._by_host[device.on_host][first : first + workload.num_devices]
        is_whole = len(found) == workload.num_devices
        return found if is_whole and all(workload.load_on(d.device_class) is not None for d in found) else ()

    @cached_property
    def by_name(self) -> dict[str, Device]:
        """The devices by name."""
        return {device.name: device for device in self.devices}

    @cached_property
    def _by_host(self) -> dict[str, tuple[Device, ...]]:
        return {
            host: tuple(device for device in self.devices if device.on_host == host)
            for host in {device.on_host for device in self.devices}
        }

    @cached_property
    def _places(self) -> dict[str, int]:
        return {device.name: place for own in self._by_host.values() for place, device in enumerate(own)}

    def domains_of(self, workload: Workload) -> list[str]:
        """The failure domains of devices that the workload may use, sorted."""
        return sorted({device.in_domain for device in self.usable(workload)})

    def replicas_per_domain(self, workload: Workload) -> tuple[int, int]:
        """The fewest and most replicas of a spread workload that a failure domain may have."""
        num_domains = max(len(self.domains_of(workload)), 1)
        return workload.num_replicas // num_domains, math.ceil(workload.num_replicas / num_domains)


def _check_workload(workload: Workload) -> None:
    where = f"workload '{workload.name}'"
    _check_range(f"{where}: memory_bytes", workload.memory_bytes, 0, _MAX_BYTES)
    _check_range(f"{where}: num_replicas", workload.num_replicas, 0, MAX_REPLICAS)
    _check_range(f"{where}: num_instances", workload.num_instances, 1, 1024)
    _check_range(f"{where}: num_devices", workload.num_devices, 1, 1024)
    if not workload.load:
        raise InvalidArgumentError(
            f"{where}: load is empty, so no device may hold it; give the share of a device's compute that a replica "
            f'needs by class of device, {{"*": 0.1}} for any'
        )
    for device_class, share in workload.load.items():
        _check_range(f"{where}: load on '{device_class}'", share, 0, 1e6)


def _check_device(device: Device) -> None:
    where = f"device '{device.name}'"
    _check_range(f"{where}: memory_bytes", device.memory_bytes, 1, _MAX_BYTES)
    _check_range(f"{where}: max_models", device.max_models, 1, MAX_REPLICAS)
    _check_range(f"{where}: index", device.index or 0, 0, 1023)
    _check_range(f"{where}: cost_per_hour", device.cost_per_hour, 0, 1e9)
    if device.device_class in ("", ANY_CLASS):
        raise InvalidArgumentError(f"{where}: device_class is '{device.device_class}'; name one, such as 'cpu'")
    _check_names(f"{where}: MIG profile", [profile.name for profile in device.mig])
    for profile in device.mig:
        _check_range(f"{where}: memory_bytes of '{profile.name}'", profile.memory_bytes, 1, _MAX_BYTES)
        _check_range(f"{where}: num_slices of '{profile.name}'", profile.num_slices, 1, 64)
        _check_share(f"{where}: compute_share of '{profile.name}'", profile.compute_share)
        if not profile.starts:
            raise InvalidArgumentError(f"{where}: MIG profile '{profile.name}' may begin nowhere; give its starts")


def _check_names(what: str, names: Sequence[str]) -> None:
    for name, number in Counter(names).items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"a {what} has the name {name!r}; give it one")
        if number > 1:
            raise InvalidArgumentError(f"{number} {what}s have the name '{name}'; names must differ")


def _is_number(value: Any, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _check_range(what: str, value: float, lowest: int, highest: float) -> None:
    """Check a number; an integer if ``highest`` is one."""
    if isinstance(highest, int):
        if not _is_number(value, int) or not lowest <= value <= highest:
            raise InvalidArgumentError(f"{what} is {value!r}; allowed: a whole number from {lowest} to {highest}")
    elif not _is_number(value, int, float) or not lowest <= value <= highest:
        raise InvalidArgumentError(f"{what} is {value!r}; allowed: a number from {lowest} to {highest:g}")


def _check_share(what: str, value: float) -> None:
    if not _is_number(value, int, float) or not 0 < value <= 1:
        raise InvalidArgumentError(f"{what} is {value!r}; allowed: above 0, at most 1")


def read_fleet(path: Path, device: Device, mig: tuple[MigProfile, ...] = ()) -> tuple[Device, ...]:
    """The devices of a file of hosts.

    Args:
        device: Class, memory and defaults of each; with an ``index``, they are GPUs and counted from 0 on each host.

    Raises:
        InvalidArgumentError: The file is invalid; the message says where, and what is allowed.
        OSError: It cannot be read.
    """
    with path.open("rb") as stream:
        content = stream.read(_MAX_FILE_BYTES + 1)
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidArgumentError(f"'{path}' is larger than {_MAX_FILE_BYTES} bytes, so it is no list of hosts")
    try:
        values = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"'{path}' is not TOML: {error}; write a table [[host]] for each host") from None
    hosts = values.pop("host", None)
    if values or not isinstance(hosts, list) or not hosts or not all(isinstance(host, dict) for host in hosts):
        unknown = f"; '{next(iter(values))}' is not known" if values else ""
        raise InvalidArgumentError(f"'{path}' needs a table [[host]] for each host, and nothing else{unknown}")
    devices: list[Device] = []
    for number, host in enumerate(hosts, 1):
        devices += _devices_of(f"'{path}', host {number}", host, device, mig)
        if len(devices) > MAX_DEVICES:
            raise InvalidArgumentError(f"'{path}' has more than {MAX_DEVICES} devices; plan for them in parts")
    return tuple(devices)


def _devices_of(where: str, host: dict[str, Any], device: Device, mig: tuple[MigProfile, ...]) -> list[Device]:
    for key, value in host.items():
        if (kind := _HOST_FIELDS.get(key)) is None:
            raise InvalidArgumentError(f"{where}: '{key}' is not known; allowed: {', '.join(_HOST_FIELDS)}")
        if not (isinstance(value, kind) if kind in (bool, str) else _is_number(value, int, kind)):
            raise InvalidArgumentError(f"{where}: {key} is {value!r}; allowed: a value of type {kind.__name__}")
    if not (name := host.get("name", "")):
        raise InvalidArgumentError(f"{where}: it has no name; give it one")
    if host.get("mig") and not mig:
        raise InvalidArgumentError(
            f"{where}: mig is true, and '{device.device_class}' cannot be partitioned; remove it"
        )
    num_devices = host.get("num_devices", 1)
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InvalidArgumentError(f"{where}: num_devices is {num_devices}; allowed: from 1 to {MAX_DEVICES}")
    common = replace(
        device,
        host=name,
        domain=host.get("domain", ""),
        max_models=host.get("max_models", device.max_models),
        cost_per_hour=float(host.get("cost_per_hour", device.cost_per_hour)),
        mig=mig if host.get("mig") else (),
    )
    return [
        replace(
            common,
            name=f"{name}-{index}" if num_devices > 1 else name,
            index=None if device.index is None else index,
        )
        for index in range(num_devices)
    ]


@cache
def known_mig() -> dict[str, tuple[MigProfile, ...]]:
    """The possible slices of GPUs, by class of device; ``mig.toml`` has the sources."""
    table = tomllib.loads(files("weft.capacity.placement").joinpath("mig.toml").read_text(encoding="utf-8"))
    return {
        name: tuple(
            MigProfile(
                one["name"], one["mib"] << 20, one["num_sms"] / gpu["num_sms"], one["num_slices"], tuple(one["starts"])
            )
            for one in gpu["profiles"]
        )
        for name, gpu in table.items()
    }


def mig_profiles(device_class: str, reserved_bytes: int = 0) -> tuple[MigProfile, ...]:
    """The slices of a class of device, less the runtime's memory in each; () for none."""
    profiles = known_mig().get(device_class, ())
    left = (replace(profile, memory_bytes=profile.memory_bytes - reserved_bytes) for profile in profiles)
    return tuple(profile for profile in left if profile.memory_bytes > 0)
