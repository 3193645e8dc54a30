"""One row for each run, as a table for people and as JSON for later."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.capacity.tuning.load import Load

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one run.

    Attributes:
        workload: What was sent where.
        mode: ``"closed, 8 at once"`` or ``"open, 100/s"``.
        num_answers, num_errors: Requests by outcome.
        errors: Failed requests by gRPC status name.
        rate_per_s: Answers per second.
        latency_ms: By percentile ("p50", ..., "max"), milliseconds; None without answers.
        cpu_s_per_1000: CPU-seconds for 1000 requests, by process.
        duration_s: Length of the run, seconds.
    """

    workload: str
    mode: str
    num_answers: int
    num_errors: int
    errors: dict[str, int]
    rate_per_s: float
    latency_ms: dict[str, float | None]
    cpu_s_per_1000: dict[str, float]
    duration_s: float


def make_row(workload: str, mode: str, load: Load, cpu_s: Mapping[str, float]) -> Row:
    """Figures of a run from its load and the CPU-seconds that each process used meanwhile."""
    num_errors = load.errors.total()
    num_requests = len(load.latencies_s) + num_errors
    latency_ms = {f"p{percent}": load.percentile_ms(percent) for percent in PERCENTILES}
    latency_ms["max"] = load.percentile_ms(100)
    return Row(
        workload,
        mode,
        len(load.latencies_s),
        num_errors,
        dict(load.errors),
        round(load.rate_per_s, 1),
        {name: None if math.isnan(value) else round(value, 3) for name, value in latency_ms.items()},
        {name: round(seconds * 1000 / num_requests, 4) for name, seconds in cpu_s.items()} if num_requests else {},
        round(load.duration_s, 3),
    )


def render(rows: Sequence[Row], machine: Mapping[str, object]) -> str:
    """The machine, then a table with one line for each row."""
    processes = list(dict.fromkeys(name for row in rows for name in row.cpu_s_per_1000))
    header = ["workload", "load", "answers", "errors", "1/s", "p50 ms", "p90 ms", "p99 ms", *processes]
    lines = [header]
    for row in rows:
        latencies = [row.latency_ms[f"p{percent}"] for percent in PERCENTILES]
        lines.append(
            [
                row.workload,
                row.mode,
                str(row.num_answers),
                str(row.num_errors),
                f"{row.rate_per_s:.0f}",
                *("-" if latency is None else f"{latency:.2f}" for latency in latencies),
                *(f"{row.cpu_s_per_1000.get(name, 0.0):.2f}" for name in processes),
            ]
        )
    meaning = "The columns of process names are CPU-seconds for 1000 requests; client is the load generator."
    return "\n".join([*machine_lines(machine), meaning, "", table(lines, left_columns=(0, 1))])


def table(lines: Sequence[Sequence[str]], *, left_columns: Collection[int]) -> str:
    """Cells in columns two blanks apart, flush right except for ``left_columns``; every line has as many cells."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def machine_lines(machine: Mapping[str, object]) -> list[str]:
    """Hardware and system; versions."""
    packages = machine.get("packages")
    versions = (
        ", ".join(f"{name} {version}" for name, version in packages.items()) if isinstance(packages, dict) else ""
    )
    return [
        f"{machine.get('cpu')}, {machine.get('num_cores')} cores, {machine.get('memory_gib')} GiB, "
        f"GPU: {machine.get('gpu')}; {machine.get('system')}",
        f"Python {machine.get('python')}, {versions}",
    ]


def write_json(
    folder: Path, rows: Sequence[Any], machine: Mapping[str, object], *, prefix: str = "", now: datetime | None = None
) -> Path:
    """A new file ``folder/<prefix><UTC time>.json`` with machine and rows, which are dataclasses; its path."""
    folder.mkdir(parents=True, exist_ok=True)
    moment = now or datetime.now(UTC)
    path = folder / f"{prefix}{moment:%Y%m%dT%H%M%SZ}.json"
    document = {"time": moment.isoformat(), "machine": machine, "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(document, indent=2) + "\n")
    return path
