"""Frames of ``weft top`` as text."""

from collections.abc import Sequence

from weft.v2.client.frames import Frame, ModelRow, ServiceRow

_SERVICE_HEAD = ("SERVICE", "METRICS AT", "CPU", "MIB", "LOOP p99 ms", "STALLS", "LOG LOST")
_MODEL_HEAD = (
    "SERVICE", "KIND", "NAME", "VERSION", "PRIO", "REQ/S", "FAIL/S", "QUEUE", "WORK", "p50 ms", "p99 ms", "WAIT p99",
)  # fmt: skip
_RANK_HEAD = ("SERVICE", "MODEL", "INSTANCE", "RANK", "STEPS/S", "STEP ms", "MIB", "KV MIB", "RESTARTS")

_ROLE_HEAD = ("SERVICE", "MODEL", "INSTANCE", "ROLE", "FETCHES/S", "FAIL/S", "MIB/S", "LEASES")
_ROLLOUT_HEAD = ("SERVICE", "GRAPH", "NODE", "CANDIDATE", "PHASE", "SHARE %", "REQ/S", "FAIL/S")


def frame_text(frame: Frame, *, width: int = 0, height: int = 0) -> str:
    """Tables of the services, of their graphs and models, busiest first, and of ranks and roles, if there are some.

    They are cut to the terminal's size; 0: no limit.
    """
    services = _table(_SERVICE_HEAD, [_service(row) for row in frame.services], num_left=2)
    models = _table(_MODEL_HEAD, [_model(row) for row in frame.models], num_left=5)
    lines = [f"the last {frame.interval_s:.1f} s", *services, "", *models]
    if frame.ranks:
        rows = [(*row[:4], *map(_number, row[4:], (1, 2, 0, 0, 0))) for row in frame.ranks]
        lines += ["", *_table(_RANK_HEAD, rows, num_left=4)]
    if frame.roles:
        rows = [(*row[:4], *map(_number, row[4:], (1, 1, 1, 0))) for row in frame.roles]
        lines += ["", *_table(_ROLE_HEAD, rows, num_left=4)]
    if frame.rollouts:
        rows = [(*row[:5], *map(_number, row[5:], (1, 1, 1))) for row in frame.rollouts]
        lines += ["", *_table(_ROLLOUT_HEAD, rows, num_left=5)]
    if height and len(lines) > height:
        num_hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], f"... {num_hidden} more"]
    return "\n".join(line[:width] if width else line for line in lines)


def _service(row: ServiceRow) -> Sequence[str]:
    if not row.is_up:
        return (row.name, f"{row.address}  DOWN: {row.error}", "", "", "", "", "")
    values = (row.cpu_cores, row.rss_mib, row.loop_lag_p99_ms, row.num_stalls, row.num_dropped_log_lines)
    return (row.name, row.address, *map(_number, values, (2, 0, 1, 0, 0)))


def _model(row: ModelRow) -> Sequence[str]:
    # without characters that move the cursor
    name = "".join(character if character.isprintable() else "?" for character in row.model)
    name += " (degraded)" if row.is_degraded else ""
    counts = (row.requests_per_s, row.failures_per_s, row.queue_size, row.num_inflight)
    texts = map(_number, (*counts, row.p50_ms, row.p99_ms, row.queue_p99_ms), (1, 1, 0, 0, 1, 1, 1))
    return (row.service, row.kind, name, row.version, row.priority or "-", *texts)


def _number(value: float | None, num_digits: int) -> str:
    return "-" if value is None else f"{value:.{num_digits}f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], *, num_left: int) -> list[str]:
    """Format a table; the first ``num_left`` columns are left-aligned text."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
