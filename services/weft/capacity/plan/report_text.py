"""The report for people."""

from collections.abc import Sequence

from weft.capacity.devices import DeviceSpec
from weft.capacity.plan.estimates import Estimate
from weft.capacity.plan.report import PlanReport
from weft.capacity.roofline import Timing

_MIB = 2**20
_HEADER = (
    "model", "x", "weights", "activ.", "arena", "KV", "runtime", "total MiB", "batch 1", "largest", "bound by", "ridge",
    "fits", "per second", "per million",
)  # fmt: skip


def _device_text(spec: DeviceSpec) -> str:
    """The device in a line."""
    peaks = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in spec.flops_per_s.items())
    return (
        f"{spec.name}: {spec.memory_bytes / 1e9:.1f} GB, {spec.bytes_per_s / 1e9:.0f} GB/s, TFLOP/s: {peaks} "
        f"({spec.source}, {spec.read})"
    )


def _estimates_text(estimates: Sequence[Estimate]) -> str:
    """A line for each model, then notes."""
    lines = [list(_HEADER), *(_cells(each) for each in estimates)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
    text = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    for each in estimates:
        if each.missing_bytes:
            text.append(
                f"{each.model} does not fit into {each.device}: {each.missing_bytes / _MIB:.0f} MiB are missing"
            )
        text += [f"{each.model}: {note}" for note in each.notes]
        if each.fault:
            text.append(f"{each.model} is not planned: {each.fault}")
    return "\n".join(text)


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


def render_report(report: PlanReport) -> str:
    """The device, a line for each model, and where they go."""
    text = [_device_text(report.device), "", _estimates_text(report.estimates)]
    if report.solution is not None and report.problem is not None:
        text += ["", "placement"]
        for device in report.problem.devices:
            held = [str(a.bin) + f": {a.workload}" for a in report.solution.assignments if a.bin.device == device.name]
            text += [f"  {line}" for line in held] or [f"  {device.name}: nothing"]
        for entry in report.solution.unplaced:
            text.append(f"  no place for {entry.num_replicas} of {entry.workload}: {entry.why}")
        text += [f"  {note}" for note in report.solution.notes]
    if report.checked is not None:
        text += ["", "change", *(f"  {line}" for line in report.checked.text().splitlines())]
    return "\n".join(text)
