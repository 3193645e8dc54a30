"""The table of goals and the table of everything."""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.report import table
from benchmarks.tis import NAME as TIS
from benchmarks.wire.candidates import ONE_PROCESS, PROCESSES, WIRES
from benchmarks.wire.rounds import Row
from benchmarks.wire.senders import TRITONCLIENT

CPU, MEAN, MEDIAN = "cpu_s_per_1000", "mean_ms", "p50_ms"


class Goal(NamedTuple):
    """A figure of Weft over that of Triton Inference Server.

    Attributes:
        text: For the table.
        workload, shape, arrangement: Whose.
        figure: Attribute of a row.
        goal: Largest ratio that meets it.
        is_mixed: Measured with tritonclient, not with h2load.
    """

    text: str
    workload: str
    shape: str
    arrangement: str
    goal: float
    figure: str = CPU
    is_mixed: bool = False


GOALS = (
    Goal("identity, one process: CPU", "identity", "4x8", ONE_PROCESS, 0.9),
    Goal("identity, router and model processes: CPU", "identity", "4x8", PROCESSES, 1.8),
    Goal("identity3, one process: CPU", "identity3", "4x8", ONE_PROCESS, 0.6),
    Goal("identity3, router and model processes: CPU", "identity3", "4x8", PROCESSES, 1.2),
    Goal("identity, one process, 1x1: mean latency", "identity", "1x1", ONE_PROCESS, 0.9, MEAN),
    Goal("MiniLM texts, one process: CPU", "MiniLM texts", "4x8", ONE_PROCESS, 0.9, is_mixed=True),
    Goal("MiniLM texts, processes: CPU", "MiniLM texts", "4x8", PROCESSES, 0.97, is_mixed=True),
)


#: For models without the parameter ``EXECUTION``.
AS_USERS_WRITE = (
    Goal("identity, one process: CPU", "identity", "4x8", ONE_PROCESS, 0.75),
    Goal("identity, router and model processes: CPU", "identity", "4x8", PROCESSES, 1.2),
    Goal("identity3, one process: CPU", "identity3", "4x8", ONE_PROCESS, 0.75),
    Goal("identity3, router and model processes: CPU", "identity3", "4x8", PROCESSES, 1.3),
    Goal("identity, one process, 1x1: median latency", "identity", "1x1", ONE_PROCESS, 1.0, MEDIAN),
    Goal("identity, processes, 1x1: median latency", "identity", "1x1", PROCESSES, 1.5, MEDIAN),
    Goal("MiniLM texts, one process: CPU", "MiniLM texts", "4x8", ONE_PROCESS, 0.85, is_mixed=True),
    Goal("MiniLM texts, processes: CPU", "MiniLM texts", "4x8", PROCESSES, 0.92, is_mixed=True),
    Goal("600 kB in, small answer, one process: CPU", "600 kB, small answer", "4x8", ONE_PROCESS, 0.8),
)


def ratio(row: Row, other: Row, figure: str = CPU) -> float:
    """A figure of one row over that of another: the median over rounds of what they had in the same round."""
    pairs = zip(row.rounds, other.rounds, strict=True)
    return statistics.median(getattr(one, figure) / (getattr(two, figure) or float("nan")) for one, two in pairs)


def goal_table(rows: Sequence[Row], goals: Sequence[Goal] = GOALS) -> str:
    """Each goal whose rows were measured, by wire; "" without any."""
    wires = [wire for wire in WIRES if any(row.wire == wire for row in rows)]
    lines = [["Weft over Triton Inference Server", "load", "theirs", "goal", *(f"over {wire}" for wire in wires)]]
    for goal in goals:
        measured = [row for row in rows if _is_of(goal, row)]
        theirs = next((row for row in measured if row.server == TIS), None)
        mine = {row.wire: row for row in measured if row.arrangement == goal.arrangement}
        if theirs is None or not mine:
            continue
        shown = [f"{goal.shape}, {theirs.sender}", f"{getattr(theirs, goal.figure):.3f}", f"{goal.goal:g}"]
        lines.append([goal.text, *shown, *(_judged(mine.get(wire), theirs, goal) for wire in wires)])
    if len(lines) == 1:
        return ""
    meaning = "theirs: CPU-seconds of all their processes for 1000 requests, or milliseconds; * meets the goal."
    return f"{meaning}\n\n{table(lines, left_columns=(0, 1))}"


def full_table(rows: Sequence[Row]) -> str:
    """Every row; the last figure is its CPU over that of Triton Inference Server with the same load."""
    theirs = {(row.workload, row.shape, row.sender): row for row in rows if row.server == TIS}
    header = [
        "workload",
        "load",
        "sender",
        "server",
        "CPU-s per 1000",
        "over TIS",
        "p50 ms",
        "p99 ms",
        "mean ms",
        "1/s",
    ]
    lines = [[*header, "requests", "errors", ""]]
    for row in rows:
        base = theirs.get((row.workload, row.shape, row.sender))
        figures = (
            f"{row.cpu_s_per_1000:.3f}",
            "-" if base is None else f"{ratio(row, base):.2f}",
            *(f"{value:.2f}" for value in (row.p50_ms, row.p99_ms, row.mean_ms)),
            f"{row.rate_per_s:.0f}",
            str(row.num_requests),
            str(row.num_errors),
        )
        lines.append([row.workload, row.shape, row.sender, row.server, *figures, "; ".join(row.problems)])
    return table(lines, left_columns=(0, 1, 2, 3, 12))


def _is_of(goal: Goal, row: Row) -> bool:
    is_sender = (row.sender == TRITONCLIENT) == goal.is_mixed
    return row.workload == goal.workload and row.shape == goal.shape and is_sender


def _judged(row: Row | None, theirs: Row, goal: Goal) -> str:
    if row is None:
        return "-"
    value = ratio(row, theirs, goal.figure)
    return f"{value:.2f}{'*' if value <= goal.goal else ' '}"
