"""``weft optimize``: a smaller and faster version of a model, behind an accuracy gate."""

import argparse
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.base.text.argument_types import add, not_negative_integer, positive, positive_integer
from weft.base.text.suggestion import printable
from weft.cli.arguments import add_json_argument, graph_version, made, pair, share
from weft.v2.client.channels import MAX_TIMEOUT_S

if TYPE_CHECKING:
    from weft.optimize.cost import VersionCost
    from weft.optimize.report import CandidateReport, Report

_INTERRUPTED = 128 + signal.SIGINT
_WRONG_USAGE, _NOTHING_BETTER = 2, 3
_ENDED = 128 + signal.SIGTERM
#: Where standard output is no terminal.
_WIDTH = 160


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft optimize``."""
    option = partial(add, parser)
    parser.description = (
        "Build smaller and faster versions of an ONNX or torch model, send held-out rows of your data "
        "through the graph with each, and write the fastest that loses no more than --max-loss as a new version "
        "beside the old one. Ends with status 0 if one was written (or would be: --dry-run), 1 if the run failed, 2 if "
        "the call is wrong, 3 if no candidate passes the gate and is faster."
    )
    parser.epilog = "example: weft optimize minilm --graph embed --data texts.jsonl --max-loss 0.5%% --report report"
    option("model MODEL", "NAME/VERSION for one version", graph_version)
    option(
        "--data PATH",
        "rows such as the graph gets: Parquet, JSON Lines or CSV, a file, folder or pattern",
        required=True,
    )
    option(
        "--max-loss 0.5%",
        "most that the upper end of the loss's 95%% interval may be; 0.005 is 0.5%%",
        share,
        required=True,
    )
    option(
        "--objective",
        "what has to be faster: a request with 1 row (default), or rows a second in requests of 32, 4 at once",
        default="latency",
        choices=("latency", "throughput"),
    )
    option("--graph GRAPH", "graph that the data goes through; default: the one that calls the model", graph_version)
    option("--method NAME ...", "try only this; may be repeated; default: all", dest="methods")
    option("--repository DIR (model_repository)", "model repository", Path)
    option("--dry-run", "do all but write the version", dest="is_dry_run")
    option("--report DIR", "gets report.json, report.svg and mesh.log", Path)
    _add_judgement(parser)
    add_json_argument(parser)


def _add_judgement(parser: argparse.ArgumentParser) -> None:
    data = partial(add, parser.add_argument_group("data"))
    data("--format", "default: by suffix", default="", choices=("parquet", "jsonl", "csv"))
    data("--column INPUT=COLUMN ...", "column of an input; default: that of the same name", pair)
    data("--calibration-rows N (256)", "at most", positive_integer, dest="num_calibration")
    data("--held-out-rows N (1000)", "at most", positive_integer, dest="num_held_out")
    data("--seed N (0)", "of the split into both", not_negative_integer)
    judgement = partial(add, parser.add_argument_group("judgement"))
    judgement(
        "--metric NAME",
        "cosine, agreement, loss, retrieval, or FILE.py:function; default: agreement where an output is a class, "
        "else cosine",
        default="",
    )
    judgement("--output OUTPUT", "of the graph, that is judged", default="")
    judgement("--label COLUMN", "with the right class; default: the original's own", default="")
    judgement("--positive COLUMN (positive)", "retrieval: the text to find")
    judgement("--rounds N (5)", "of the measurement of the cost", positive_integer, dest="num_rounds")
    judgement("--timeout-ms N (60000)", "deadline of a request", positive)


def run(options: argparse.Namespace) -> int:
    """Optimise and print the report.

    Returns:
        0: a better version was written, or would be without --dry-run. 2: wrong usage: no such model, graph, method or
        data, for example. 3: no candidate passes the gate and is faster. 130: after Ctrl-C. A failed run raises its
        error, for status 1.
    """
    try:
        return _run(options)
    except (InvalidArgumentError, NotFoundError) as error:
        print(printable(f"weft: {error.code}: {error.message}"), file=sys.stderr)
        return _WRONG_USAGE


def _run(options: argparse.Namespace) -> int:
    from weft.optimize.optimize import OptimizeOptions, optimize  # noqa: PLC0415  # torch, pyarrow
    from weft.optimize.report import draw  # noqa: PLC0415

    name, _, version = options.model.partition("/")
    folder: Path | None = options.report
    if folder is not None:
        if folder.exists() and not folder.is_dir():
            raise InvalidArgumentError(f"--report {folder} is no folder")
        folder.mkdir(parents=True, exist_ok=True)
    settings = made(
        OptimizeOptions,
        options,
        model=name,
        version=int(version) if version else None,
        graph=options.graph or "",
        column_of=dict(options.column),
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
        log=None if folder is None else folder / "mesh.log",
    )
    console = Console(stderr=True)
    with _ends_on_sigterm():
        try:
            with console.status("reading the repository") as status:
                report = optimize(settings, status.update if console.is_terminal else _tell)
        except KeyboardInterrupt:
            print("weft: interrupted; nothing was written", file=sys.stderr)
            return _INTERRUPTED
    facts = report.as_json()
    if folder is not None:
        (folder / "report.json").write_text(json.dumps(facts, indent=2) + "\n")
        (folder / "report.svg").write_text(draw(report))
    if options.json:
        print(json.dumps(facts))
    else:
        _print(report, is_dry_run=options.is_dry_run)
    return 0 if report.picked else _NOTHING_BETTER


@contextlib.contextmanager
def _ends_on_sigterm() -> Iterator[None]:
    """Clean up on SIGTERM as on Ctrl-C."""

    def end(*_: Any) -> None:
        raise SystemExit(_ENDED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(text: str) -> None:
    print(f"weft optimize: {text}", file=sys.stderr)


def _print(report: "Report", *, is_dry_run: bool) -> None:
    console = Console(width=None if sys.stdout.isatty() else _WIDTH, soft_wrap=False, highlight=False)
    through = f" through {report.graph}" if report.graph else ""
    unanswered = f"; {report.num_unanswered_rows} more have no answer" if report.num_unanswered_rows else ""
    console.print(
        f"{report.model} version {report.version}{through}; {report.num_held_out_rows} held-out rows{unanswered}, "
        f"{report.num_calibration_rows} for calibration.\n"
        f"Loss: {report.meaning}; its interval is of 95 %, and its upper end may be {report.max_loss:.2%}. "
        f"Objective: {report.objective}."
    )
    console.print(_table(report))
    for candidate in report.candidates:
        if candidate.reason:
            console.print(f"{candidate.method}: {candidate.reason}", markup=False)
    if not report.picked:
        console.print(f"Nothing is written: {report.why_none}.", markup=False)
    elif is_dry_run:
        console.print(f"{report.picked} would be written; this is a dry run.", markup=False)
    else:
        console.print(f"{report.picked} is version {report.written} of {report.model} now.", markup=False)
    for sentence in report.advice:
        console.print(sentence, markup=False)


def _table(report: "Report") -> Table:
    table = Table()
    is_busy = report.objective == "throughput"
    table.add_column("candidate")
    table.add_column("gate")
    table.add_column("loss, %", justify="right")
    table.add_column("interval", justify="right")
    table.add_column("size, MB", justify="right")
    for rows in report.costs:
        plural = "row" if rows == 1 else "rows"
        table.add_column(f"CPU-s/1000,\n{rows} {plural}", justify="right")
        table.add_column("p50, ms", justify="right")
        table.add_column("rows/s,\n4 at once" if is_busy else "p99, ms", justify="right")
        table.add_column("time, of the\noriginal's", justify="right")
    table.add_row("original", "", "", "", _megabytes(report.size_bytes), *_cells(report, report.costs))
    for candidate in report.candidates:
        table.add_row(*_row(report, candidate), style="bold" if candidate.method == report.picked else "")
    return table


def _row(report: "Report", candidate: "CandidateReport") -> list[str]:
    loss = candidate.loss
    judged = ["", ""] if loss is None else [f"{loss.value:.2%}"[:-1], f"{loss.low * 100:.2f} to {loss.high * 100:.2f}"]
    size = _megabytes(candidate.size_bytes) if candidate.size_bytes else ""
    return [candidate.method, candidate.state, *judged, size, *_cells(report, candidate.costs)]


def _cells(report: "Report", costs: "Any") -> list[str]:
    is_busy = report.objective == "throughput"
    return [cell for rows in report.costs for cell in (_cost(costs[rows], is_busy) if rows in costs else [""] * 4)]


def _cost(cost: "VersionCost", is_busy: bool) -> list[str]:
    last, ratio = (cost.rows_per_s, cost.busy_time_ratio) if is_busy else (cost.p99_ms, cost.time_ratio)
    return [f"{cost.cpu_s_per_1000:.3g}", f"{cost.p50_ms:.3g}", f"{last:.3g}", f"{ratio:.2f}"]


def _megabytes(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:.3g}"
