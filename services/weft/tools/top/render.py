"""A frame as text."""

from collections.abc import Sequence

from weft.tools.top.frame import Frame, ModelRow, ServiceRow

_SERVICE_HEAD = ("SERVICE", "METRICS AT", "CPU", "MIB", "LOOP p99 ms", "STALLS", "LOG LOST")
_MODEL_HEAD = (
    "SERVICE", "KIND", "NAME", "VERSION", "PRIO", "REQ/S", "FAIL/S", "QUEUE", "WORK", "p50 ms", "p99 ms", "WAIT p99",
)  # fmt: skip
_NUM_LEFT = 5  # columns of text, which are aligned to the left; figures are to the right


def frame_text(frame: Frame, *, width: int = 0, height: int = 0) -> str:
    """Two tables: the services, and their graphs and models, busiest first.

    Args:
        frame: What to show.
        width: Of the terminal; longer lines are cut. 0: no limit.
        height: As ``width``.
    """
    services = _table(_SERVICE_HEAD, [_service(row) for row in frame.services], num_left=2)
    models = _table(_MODEL_HEAD, [_model(row) for row in frame.models], num_left=_NUM_LEFT)
    lines = [f"the last {frame.interval_s:.1f} s", *services, "", *models]
    if height and len(lines) > height:
        num_hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], f"... {num_hidden} more"]
    return "\n".join(line[:width] if width else line for line in lines)


def _service(row: ServiceRow) -> Sequence[str]:
    if not row.is_up:
        return (row.name, f"{row.address}  DOWN: {row.error}", "", "", "", "", "")
    return (
        row.name,
        row.address,
        _number(row.cpu_cores, 2),
        _number(row.rss_mib, 0),
        _number(row.loop_lag_p99_ms, 1),
        _number(row.num_stalls, 0),
        _number(row.num_dropped_log_lines, 0),
    )


def _model(row: ModelRow) -> Sequence[str]:
    return (
        row.service,
        row.kind,
        _shown(row.model) + (" (degraded)" if row.is_degraded else ""),
        row.version,
        row.priority or "-",
        _number(row.requests_per_s, 1),
        _number(row.failures_per_s, 1),
        _number(row.queue_size, 0),
        _number(row.num_inflight, 0),
        _number(row.p50_ms, 1),
        _number(row.p99_ms, 1),
        _number(row.queue_p99_ms, 1),
    )


def _shown(name: str) -> str:
    """A name without characters that move the cursor."""
    return "".join(character if character.isprintable() else "?" for character in name)


def _number(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
