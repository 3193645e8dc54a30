"""The hosts that replicas can be placed on, in a TOML file, and the slices of their GPUs.

::

    [[host]]
    name = "gpu-a"
    domain = "zone-a"       # failure domain; default: the host
    num_devices = 8         # default: 1
    max_models = 4          # that share a device or slice; default: that of the caller
    cost_per_hour = 2.5     # of a device; default: that of the caller
    mig = true              # whether its GPUs can be partitioned; default: false
"""

import tomllib
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError
from weft.capacity.placement.problem import MAX_DEVICES, Device, MigProfile

_FIELDS = {"name": str, "domain": str, "num_devices": int, "max_models": int, "cost_per_hour": float, "mig": bool}
_MAX_FILE_BYTES = 1 << 20


def read_fleet(path: Path, device: Device, mig: tuple[MigProfile, ...] = ()) -> tuple[Device, ...]:
    """The devices of a file.

    Args:
        path: Of the file.
        device: Class, memory and defaults of each; with an ``index``, they are GPUs and counted from 0 on each host.
        mig: Slices of devices that can be partitioned.

    Raises:
        InvalidArgumentError: The file is none such: where, what is wrong, what is allowed.
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
        devices += _devices(f"'{path}', host {number}", host, device, mig)
        if len(devices) > MAX_DEVICES:
            raise InvalidArgumentError(f"'{path}' has more than {MAX_DEVICES} devices; plan for them in parts")
    return tuple(devices)


def _devices(where: str, host: dict[str, Any], device: Device, mig: tuple[MigProfile, ...]) -> list[Device]:
    for key, value in host.items():
        if key not in _FIELDS:
            raise InvalidArgumentError(f"{where}: '{key}' is not known; allowed: {', '.join(_FIELDS)}")
        wanted: tuple[type, ...] = (int, float) if _FIELDS[key] is float else (_FIELDS[key],)
        if not isinstance(value, wanted) or (isinstance(value, bool) and _FIELDS[key] is not bool):
            raise InvalidArgumentError(f"{where}: {key} is {value!r}; allowed: a value of type {_FIELDS[key].__name__}")
    if not (name := host.get("name", "")):
        raise InvalidArgumentError(f"{where}: it has no name; give it one")
    if host.get("mig") and not mig:
        raise InvalidArgumentError(
            f"{where}: mig is true, and '{device.device_class}' cannot be partitioned; remove it"
        )
    num_devices = host.get("num_devices", 1)
    if not 1 <= num_devices <= MAX_DEVICES:
        raise InvalidArgumentError(f"{where}: num_devices is {num_devices}; allowed: from 1 to {MAX_DEVICES}")
    return [
        replace(
            device,
            name=f"{name}-{index}" if num_devices > 1 else name,
            host=name,
            domain=host.get("domain", ""),
            index=None if device.index is None else index,
            max_models=host.get("max_models", device.max_models),
            cost_per_hour=float(host.get("cost_per_hour", device.cost_per_hour)),
            mig=mig if host.get("mig") else (),
        )
        for index in range(num_devices)
    ]


@cache
def known_mig() -> dict[str, tuple[MigProfile, ...]]:
    """The slices that GPUs can have, by class of device; ``mig.toml`` has the sources."""
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
    """The slices of a class of device, () for one that has none.

    Args:
        device_class: ``"H100-80GB"``.
        reserved_bytes: What the runtime takes of each slice before a model is there.
    """
    profiles = known_mig().get(device_class, ())
    left = (replace(profile, memory_bytes=profile.memory_bytes - reserved_bytes) for profile in profiles)
    return tuple(profile for profile in left if profile.memory_bytes > 0)
