"""``python -m benchmarks.optimize``: every method of ``weft optimize`` on three models of the CPU.

MiniLM through the graph ``embed``, judged by what a search finds (``retrieval_pairs.py``); ``digits_cnn``, judged by
its labels; ResNet-50 with random weights, of which the cost alone means something. Size, CPU and loss of each candidate
are those that ``weft optimize`` itself reports: the original and a candidate are measured in turn, round by round.
The exit status is 1 where the goal of MiniLM is missed: half the CPU time or less at a loss of less than 0.5 %.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import numpy as np

from benchmarks import machine
from benchmarks.report import machine_lines, table
from benchmarks.resnet import write_pictures, write_resnet
from benchmarks.retrieval_pairs import write_pairs
from weft.optimize.cost import VersionCost
from weft.optimize.optimize import OptimizeOptions, optimize
from weft.optimize.report import CandidateReport, Report, draw

ROOT = Path(__file__).resolve().parents[1]
SAMPLES = ROOT / "model_repository"
#: Of MiniLM: share of the original's CPU time, and loss.
GOAL_RATIO, GOAL_LOSS = 0.5, 0.005
_NUM_PICTURES = 24
_NUM_CALIBRATION = 192


class Case(NamedTuple):
    """A model to optimise.

    Attributes:
        name: Of the model.
        prepare: Writes data into a folder, and a repository if it is not the samples'; options from what is written.
    """

    name: str
    prepare: Callable[[Path], OptimizeOptions]


def _minilm(folder: Path) -> OptimizeOptions:
    num_pairs = write_pairs(folder / "pairs.jsonl")
    return OptimizeOptions(
        "minilm",
        str(folder / "pairs.jsonl"),
        GOAL_LOSS,
        SAMPLES,
        graph="embed",
        metric="retrieval",
        positive="passage",
        column_of={"TEXT": "query"},
        num_calibration=_NUM_CALIBRATION,
        num_held_out=num_pairs - _NUM_CALIBRATION,
    )


def _digits_cnn(folder: Path) -> OptimizeOptions:
    held_out = np.load(SAMPLES / "data" / "digits" / "held_out.npz")
    pixels = held_out["images"].astype(np.float32)[:, None] * np.float32(16 / 255)
    rows = [{"PIXELS": x.tolist(), "label": int(y)} for x, y in zip(pixels, held_out["labels"], strict=True)]
    (folder / "digits.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return OptimizeOptions("digits_cnn", str(folder / "digits.jsonl"), 0.02, SAMPLES, graph="digits_cnn", label="label")


def _resnet(folder: Path) -> OptimizeOptions:
    write_resnet(folder / "repository")
    write_pictures(folder / "pictures.jsonl", _NUM_PICTURES)
    return OptimizeOptions(
        "resnet50", str(folder / "pictures.jsonl"), 1.0, folder / "repository", metric="cosine", num_calibration=8
    )


CASES = (Case("minilm", _minilm), Case("digits_cnn", _digits_cnn), Case("resnet50", _resnet))


def run_case(case: Case, methods: Sequence[str], num_rounds: int, *, is_quick: bool) -> Report:
    """What ``weft optimize --dry-run`` finds. Raises WeftError."""
    with tempfile.TemporaryDirectory(prefix="weft-bench-") as folder:
        options = dataclasses.replace(
            case.prepare(Path(folder)), methods=methods, num_rounds=num_rounds, is_dry_run=True
        )
        if is_quick:
            options = dataclasses.replace(options, num_calibration=16, num_held_out=40)
        return optimize(options, lambda text: print(f"{case.name}: {text}", file=sys.stderr))


def render(report: Report) -> str:
    """A line for the original and for each candidate, for requests of each number of rows."""
    sizes = list(report.costs)
    header = ["candidate", "MB", "loss %", "interval"]
    header += [f"{head}, {rows} at once" for rows in sizes for head in ("CPU-s/1000", "share", "p50 ms", "p99 ms")]
    lines = [header, ["original", f"{report.size_bytes / 1e6:.3g}", "", "", *_cells(report.costs, sizes)]]
    notes = []
    for one in report.candidates:
        if one.costs and one.loss is not None:
            loss = [f"{one.loss.value:.2%}"[:-1], f"{one.loss.low * 100:.2f} to {one.loss.high * 100:.2f}"]
            lines.append([one.method, f"{one.size_bytes / 1e6:.3g}", *loss, *_cells(one.costs, sizes)])
        notes.append(f"  {one.method}: {one.state}; {one.notes or one.reason}")
    title = f"{report.model}; loss: {report.meaning}; {report.num_held_out_rows} rows held out"
    return "\n".join([title, table(lines, left_columns=(0,)), *notes])


def _cells(costs: "dict[int, VersionCost]", sizes: Sequence[int]) -> list[str]:
    return [
        cell
        for rows in sizes
        for cell in (
            f"{costs[rows].cpu_s_per_1000:.3g}",
            f"{costs[rows].ratio:.2f}",
            f"{costs[rows].p50_ms:.3g}",
            f"{costs[rows].p99_ms:.3g}",
        )
    ]


def meets_goal(candidate: CandidateReport) -> bool:
    """At most half the CPU time, one row at a time and many at once together, and a loss below 0.5 %."""
    return bool(
        candidate.costs
        and candidate.loss is not None
        and geometric_mean(cost.ratio for cost in candidate.costs.values()) <= GOAL_RATIO
        and candidate.loss.value < GOAL_LOSS
    )


def main(argv: Sequence[str] | None = None) -> int:
    """0 when MiniLM meets its goal, or was not measured."""
    parser = argparse.ArgumentParser(prog="benchmarks.optimize", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", choices=[case.name for case in CASES], metavar="MODEL")
    parser.add_argument("--method", action="append", default=[], metavar="NAME", help="default: all that suit")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="of the cost (default 5)")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", metavar="DIR")
    parser.add_argument("--quick", action="store_true", help="few rows; figures mean nothing")
    options = parser.parse_args(argv)
    described = machine.describe()
    print("\n".join(machine_lines(described)))
    reports = []
    for case in CASES:
        if not options.only or case.name in options.only:
            report = run_case(case, options.method, options.rounds, is_quick=options.quick)
            reports.append(report)
            print(f"\n{render(report)}")
    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"optimize-{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    for report in reports:
        path.with_name(f"{path.stem}-{report.model}.svg").write_text(draw(report))
    facts = {"machine": described, "reports": [report.as_json() for report in reports]}
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(f"written to {path}")
    judged = [report for report in reports if report.model == "minilm"]
    if not judged:
        return 0
    good = [one.method for report in judged for one in report.candidates if meets_goal(one)]
    what = f"MiniLM at {GOAL_RATIO:.0%} of the CPU time or less, losing less than {GOAL_LOSS:.1%}"
    print(f"{what}: {', '.join(good) or 'missed by every candidate'}")
    sure = [one.method for report in judged for one in report.candidates if one.state == "passes" and meets_goal(one)]
    print(f"and by the gate, which takes the upper end of the interval: {', '.join(sure) or 'none'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
