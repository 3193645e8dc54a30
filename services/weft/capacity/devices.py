"""Devices for planning: memory, bandwidth, compute."""

import datetime
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.text.suggestion import suggestion

#: Types that a peak is given for, each with what multiplies it where the device has no peak of its own.
_INSTEAD = {
    "fp32": (), "tf32": ("fp32",), "fp16": ("fp32",), "bf16": ("fp16", "fp32"), "int8": ("fp16", "fp32"),
    "fp8": ("int8", "fp16", "fp32"), "fp4": ("fp8", "int8", "fp16", "fp32"),
}  # fmt: skip
#: Bytes of an element of each type.
TYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "fp8": 1.0, "fp4": 0.5}
#: Shares of the peaks that good kernels reach: 788 of 989 TFLOP/s and 4.3 of 4.8 TB/s were measured on an H200.
_COMPUTE_SHARE, _BANDWIDTH_SHARE = 0.8, 0.9
#: Between the starts of two kernels of an eager program on a GPU.
_KERNEL_S = 5e-6
#: What CUDA, its libraries and their code take on a GPU before a model is there.
_GPU_RUNTIME_BYTES = 600 * 2**20
_MAX_FILE_BYTES = 1 << 20
_FIELDS = {
    "memory_gib", "bandwidth_gb_per_s", "tflops", "aliases", "power_w", "compute_share", "bandwidth_share",
    "kernel_us", "runtime_mib", "is_cpu", "num_cores", "source", "read", "name", "link",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device.

    Attributes:
        flops_per_s: Peak floating-point or integer operations per second by type, a multiply-add counted as two.
        is_cpu: Weights, activations and the runtime are in the memory of the host.
        num_cores: Of a CPU; 0: unknown, or a GPU.
        power_w: Maximum electrical power, watts; 0: unknown.
        compute_share, bandwidth_share: Share of the peaks that good kernels reach.
        kernel_s: Overhead of starting a kernel, seconds.
        runtime_bytes: Memory of the runtime before a model is loaded.
        link: Between such devices of one machine, of ``links.toml``.
        source, read: Origin of the numbers, and the day they were read or measured.
    """

    name: str
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    is_cpu: bool = False
    num_cores: int = 0
    power_w: float = 0.0
    compute_share: float = _COMPUTE_SHARE
    bandwidth_share: float = _BANDWIDTH_SHARE
    kernel_s: float = _KERNEL_S
    runtime_bytes: int = _GPU_RUNTIME_BYTES
    source: str = ""
    read: str = ""
    link: str = "pcie4"

    def peak(self, kind: str) -> float:
        """Operations per second on values of a type of ``TYPE_BYTES``; of a wider type if it has none."""
        return next(self.flops_per_s[each] for each in (kind, *_INSTEAD[kind]) if each in self.flops_per_s)

    def ridge(self, kind: str) -> float:
        """Operations per byte above which compute, not memory, bounds the time."""
        return self.peak(kind) * self.compute_share / (self.bytes_per_s * self.bandwidth_share)


def known_devices(*, with_aliases: bool = False) -> dict[str, DeviceSpec]:
    """The known devices by name, or by each of their names in lower case."""
    text = files("weft.capacity").joinpath("known.toml").read_text(encoding="utf-8")
    found: dict[str, DeviceSpec] = {}
    for name, values in tomllib.loads(text).items():
        names = [alias.lower() for alias in (name, *values.get("aliases", ()))] if with_aliases else [name]
        found |= dict.fromkeys(names, _device(name, values, "known.toml"))
    return found


def find_device(name: str) -> DeviceSpec:
    """A known device, by name or alias in any case, or the one described by a TOML file.

    Raises:
        NotFoundError: There is neither; the message names the nearest.
        InvalidArgumentError: The file does not describe a device; the message says why.
    """
    by_name = known_devices(with_aliases=True)
    if (found := by_name.get(name.lower())) is not None:
        return found
    path = Path(name)
    if path.is_file():
        return _read_device(path)
    if path.suffix or path.exists() or "/" in name:
        raise NotFoundError(
            f"device '{name}' is no file that can be read; give a TOML file with memory_gib, bandwidth_gb_per_s and "
            f"tflops, 'this', or one of {', '.join(known_devices())}"
        )
    own = ("this", "this-gpu")
    raise NotFoundError(
        f"device '{name}' is not known{suggestion(name.lower(), [*by_name, *own])}; known are "
        f"{', '.join([*known_devices(), *own])}; another is described by a TOML file with memory_gib, "
        f"bandwidth_gb_per_s and tflops"
    )


def _read_device(path: Path) -> DeviceSpec:
    """A device in a file, with the fields of ``known.toml``; its name is the file's unless given."""
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidArgumentError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; it should describe one device")
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no description of a device in TOML: {error}") from error
    if len(values) == 1 and isinstance(only := next(iter(values.values())), dict) and "memory_gib" in only:
        return _device(next(iter(values)), only, str(path))
    return _device(str(values.get("name", path.stem)), values, str(path))


def _device(name: str, values: Mapping[str, Any], where: str) -> DeviceSpec:
    for field_name in values:
        if field_name not in _FIELDS:
            raise InvalidArgumentError(f"{where}: unknown field '{field_name}'{suggestion(field_name, _FIELDS)}")
    tflops = values.get("tflops")
    if not isinstance(tflops, dict) or not tflops.keys() & {"fp32", "fp16"}:
        raise InvalidArgumentError(
            f"{where}: tflops must be a table with fp32 or fp16, such as {{ fp32 = 19.5 }}, got {tflops!r}"
        )
    for kind in tflops:
        if kind not in TYPE_BYTES:
            raise InvalidArgumentError(f"{where}: tflops of an unknown type '{kind}'{suggestion(kind, TYPE_BYTES)}")
    peaks = {kind: 1e12 * _number(tflops, kind, where, 1e6) for kind in tflops}
    peaks.setdefault("fp32", peaks.get("fp16", 0.0))
    is_cpu = values.get("is_cpu", False)
    if not isinstance(is_cpu, bool):
        raise InvalidArgumentError(f"{where}: is_cpu must be true or false, got {is_cpu!r}")
    read = values.get("read", "")

    def number(field: str, most: float, default: float | None = None) -> float:
        return _number(values, field, where, most, default)

    return DeviceSpec(
        name,
        int(2**30 * number("memory_gib", 1e6)),
        1e9 * number("bandwidth_gb_per_s", 1e6),
        peaks,
        is_cpu=is_cpu,
        num_cores=int(number("num_cores", 4096, 0)),
        power_w=number("power_w", 1e5, 0),
        compute_share=number("compute_share", 1, _COMPUTE_SHARE),
        bandwidth_share=number("bandwidth_share", 1, _BANDWIDTH_SHARE),
        kernel_s=1e-6 * number("kernel_us", 1e6, _KERNEL_S * 1e6),
        runtime_bytes=int(2**20 * number("runtime_mib", 1e6, _GPU_RUNTIME_BYTES / 2**20)),
        source=str(values.get("source", where)),
        read=read.isoformat() if isinstance(read, datetime.date) else str(read),
        link=str(values.get("link", "loopback" if is_cpu else "pcie4")),
    )


def _number(values: Mapping[str, Any], name: str, where: str, most: float, default: float | None = None) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidArgumentError(f"{where}: {name} must be a number above 0, got {value!r}")
    if not 0 <= value <= most or (value == 0 and default != 0):
        raise InvalidArgumentError(f"{where}: {name} must be above 0 and at most {most:g}, got {value!r}")
    return float(value)
