"""``weft tune``: the settings that serve a graph best on this machine."""

import argparse
import json
import signal
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import InvalidArgumentError
from weft.base.text.argument_types import add, not_negative_integer, positive, positive_integer
from weft.cli.arguments import add_json_argument, graph_version, made, pair

if TYPE_CHECKING:
    from weft.capacity.tuning.space import SearchSpace
    from weft.capacity.tuning.trials import TrialRecord

_INTERRUPTED = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft tune``."""
    option = partial(add, parser)
    parser.description = (
        "Search instances, batches, delays, length buckets, threads and processes of a graph's models on "
        "this machine, each trial a mesh of its own under load, and keep what is best within the latencies asked for. "
        "Nothing in the repository changes without --write."
    )
    parser.epilog = "example: weft tune embed --slo p99=50ms --data texts.jsonl --column TEXT=sentence"
    option("graph GRAPH", "graph or model; NAME/VERSION for one version", graph_version)
    option(
        "--slo pNN=TIME ...",
        "latency to keep, such as p99=50ms; may be repeated; the first is the objective 'latency'",
        required=True,
        dest="limits",
    )
    option(
        "--objective",
        "what decides within the latencies; default: throughput, with planned arrivals cpu",
        choices=("throughput", "cpu", "latency"),
    )
    option("--repository DIR (model_repository)", kind=Path)
    _add_load(parser)
    search = partial(add, parser.add_argument_group("search"))
    search("--trials N (30)", "at most", positive_integer, dest="num_trials")
    search("--budget-s N (600)", "for all of it", positive)
    search("--run-s N (2)", "one run under load", positive)
    search(
        "--confirm-rounds N (5)",
        "rounds of the pick against what is shipped, at the end",
        positive_integer,
        dest="num_confirmations",
    )
    search("--sampler (nsga2)", "Optuna's", choices=("nsga2", "tpe"))
    search("--seed N (0)", kind=not_negative_integer)
    search("--study DIR", "folder of the trials; default: tune-GRAPH", Path)
    search("--resume", "go on with the trials in --study")
    result = partial(add, parser.add_argument_group("result"))
    result("--write", "write the pick into the repository; what was there stands beside it as config.pbtxt.before-tune")
    result("--output DIR", "write a copy of the repository with the pick into this new folder", Path)
    add_json_argument(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    rows = partial(add, load.add_mutually_exclusive_group())
    rows("--data PATH", "rows to send: Parquet, JSON Lines or CSV as of weft batch; default: random values", default="")
    rows("--recorded PATH", "the same with a column at_s: rows are sent as they arrived, in seconds", default="")
    add(load, "--column INPUT=COLUMN ...", "default: that of the same name", pair, dest="column_of")
    add(load, "--rows-per-request N (1)", "where there is a batch", positive_integer)
    pace = partial(add, load.add_mutually_exclusive_group())
    pace("--rate N", "Poisson arrivals a second; of recorded ones their mean rate", positive, 0.0, dest="rate_per_s")
    pace(
        "--concurrency N",
        "requests at once; default: 4 for each core, for throughput as many as keep the latencies",
        positive_integer,
        0,
    )


def run(options: argparse.Namespace) -> int:
    """Search, print what was found; 0 when the search has ended, 1 if it cannot begin or go on, 130 after Ctrl-C."""
    from weft.capacity.tuning.measurement import parse_limit  # noqa: PLC0415
    from weft.capacity.tuning.tune import TuneOptions, text, tune  # noqa: PLC0415  # Optuna is an extra

    if options.recorded and options.concurrency:
        raise InvalidArgumentError(
            "--recorded and --concurrency exclude each other; --data sends rows without their times"
        )
    is_open = bool(options.rate_per_s or options.recorded)
    study = options.study or Path(f"tune-{options.graph.replace('/', '-')}")
    tuned = made(
        TuneOptions,
        options,
        limits=tuple(parse_limit(limit) for limit in options.limits),
        study=study,
        objective=options.objective or ("cpu" if is_open else "throughput"),
        column_of=dict(options.column_of),
    )
    try:
        outcome = tune(tuned, _show)
    except KeyboardInterrupt:
        print(f"weft: interrupted; --study {study} --resume goes on", file=sys.stderr)
        return _INTERRUPTED
    if options.json:
        print(json.dumps(outcome.facts))
        return 0
    print(text(outcome.facts))
    if outcome.files:
        print(f"written: {', '.join(map(str, outcome.files))}")
    elif outcome.diff:
        print(f"\n{outcome.diff}\n--write puts it into the repository, --output DIR into a copy of it")
    return 0


def _show(record: "TrialRecord", space: "SearchSpace") -> None:
    """Print a finished trial to standard error."""
    changes = ", ".join(f"{key} {new}" for key, (_, new) in space.changes(record.configuration).items())
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in record.gains.items())
    mark = "*" if record.is_incumbent else " "
    shown = f"times as good: {gains}" if gains else record.reason
    if gains and record.reason:
        shown += f"; {record.reason}"
    print(f"{mark} {record.outcome}: {changes or 'as it is shipped'}: {shown}", file=sys.stderr)
