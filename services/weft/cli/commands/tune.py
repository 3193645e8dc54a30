"""``weft tune``: the settings that serve a graph best on this machine."""

import argparse
import json
import signal
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.errors import InvalidArgumentError, UnsupportedError, WeftError
from weft.base.text.argument_types import not_negative_integer, positive, positive_integer
from weft.cli.argument_types import graph_version, pair
from weft.cli.arguments import add_json_argument

if TYPE_CHECKING:
    from weft.capacity.tuning.space import SearchSpace
    from weft.capacity.tuning.trials import TrialRecord

_INTERRUPTED = 128 + signal.SIGINT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft tune``."""
    parser.description = (
        "Search instances, batches, delays, length buckets, threads and processes of a graph's models on "
        "this machine, each trial a mesh of its own under load, and keep what is best within the latencies asked for. "
        "Nothing in the repository changes without --write."
    )
    parser.epilog = "example: weft tune embed --slo p99=50ms --data texts.jsonl --column TEXT=sentence"
    parser.add_argument(
        "graph", type=graph_version, metavar="GRAPH", help="graph or model; NAME/VERSION for one version"
    )
    parser.add_argument(
        "--slo",
        dest="limits",
        action="append",
        required=True,
        metavar="pNN=TIME",
        help="latency to keep, such as p99=50ms; may be repeated; the first is the objective 'latency'",
    )
    parser.add_argument(
        "--objective",
        choices=("throughput", "cpu", "latency"),
        help="what decides within the latencies; default: throughput, with planned arrivals cpu",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: model_repository"
    )
    _add_load(parser)
    search = parser.add_argument_group("search")
    search.add_argument(
        "--trials", dest="num_trials", type=positive_integer, default=30, metavar="N", help="at most; default: 30"
    )
    search.add_argument("--budget-s", type=positive, default=600.0, metavar="N", help="for all of it; default: 600")
    search.add_argument("--run-s", type=positive, default=2.0, metavar="N", help="one run under load; default: 2")
    search.add_argument(
        "--confirm-rounds",
        dest="num_confirmations",
        type=positive_integer,
        default=5,
        metavar="N",
        help="rounds of the pick against what is shipped, at the end; default: 5",
    )
    search.add_argument("--sampler", choices=("nsga2", "tpe"), default="nsga2", help="Optuna's; default: nsga2")
    search.add_argument("--seed", type=not_negative_integer, default=0, metavar="N", help="default: 0")
    search.add_argument("--study", type=Path, metavar="DIR", help="folder of the trials; default: tune-GRAPH")
    search.add_argument("--resume", action="store_true", help="go on with the trials in --study")
    result = parser.add_argument_group("result")
    result.add_argument(
        "--write",
        action="store_true",
        help="write the pick into the repository; what was there stands beside it as config.pbtxt.before-tune",
    )
    result.add_argument(
        "--output", type=Path, metavar="DIR", help="write a copy of the repository with the pick into this new folder"
    )
    add_json_argument(parser)


def _add_load(parser: argparse.ArgumentParser) -> None:
    load = parser.add_argument_group("load")
    rows = load.add_mutually_exclusive_group()
    rows.add_argument(
        "--data",
        default="",
        metavar="PATH",
        help="rows to send: Parquet, JSON Lines or CSV as of weft batch; default: random values",
    )
    rows.add_argument(
        "--recorded",
        default="",
        metavar="PATH",
        help="the same with a column at_s: rows are sent as they arrived, in seconds",
    )
    load.add_argument(
        "--column",
        dest="column_of",
        action="append",
        default=[],
        type=pair,
        metavar="INPUT=COLUMN",
        help="default: that of the same name",
    )
    load.add_argument(
        "--rows-per-request", type=positive_integer, default=1, metavar="N", help="where there is a batch; default: 1"
    )
    pace = load.add_mutually_exclusive_group()
    pace.add_argument(
        "--rate",
        dest="rate_per_s",
        default=0.0,
        type=positive,
        metavar="N",
        help="Poisson arrivals a second; of recorded ones their mean rate",
    )
    pace.add_argument(
        "--concurrency",
        default=0,
        type=positive_integer,
        metavar="N",
        help="requests at once; default: 4 for each core, for throughput as many as keep the latencies",
    )


def run(options: argparse.Namespace) -> int:
    """Search, print what was found; 0 when the search has ended, 1 if it cannot begin or go on, 130 after Ctrl-C."""
    try:
        from weft.capacity.tuning.measurement import parse_limit  # noqa: PLC0415
        from weft.capacity.tuning.tune import (  # noqa: PLC0415  # Optuna is an extra
            TuneOptions,
            text,
            tune,
        )
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    if options.recorded and options.concurrency:
        raise InvalidArgumentError(
            "--recorded and --concurrency exclude each other; --data sends rows without their times"
        )
    is_open = bool(options.rate_per_s or options.recorded)
    study = options.study or Path(f"tune-{options.graph.replace('/', '-')}")
    given = {field.name: getattr(options, field.name) for field in fields(TuneOptions) if hasattr(options, field.name)}
    parsed = {
        "limits": tuple(parse_limit(limit) for limit in options.limits),
        "study": study,
        "objective": options.objective or ("cpu" if is_open else "throughput"),
        "column_of": dict(options.column_of),
    }
    tuned = TuneOptions(**given | parsed)
    try:
        outcome = tune(tuned, _show)
    except ModuleNotFoundError as error:
        raise _missing(error) from error
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
    """A trial that has ended, on standard error."""
    changes = ", ".join(f"{key} {new}" for key, (_, new) in space.changes(record.configuration).items())
    gains = ", ".join(f"{name} {gain:.2f}" for name, gain in record.gains.items())
    mark = "*" if record.is_incumbent else " "
    shown = f"times as good: {gains}" if gains else record.reason
    if gains and record.reason:
        shown += f"; {record.reason}"
    print(f"{mark} {record.outcome}: {changes or 'as it is shipped'}: {shown}", file=sys.stderr)


def _missing(error: ModuleNotFoundError) -> WeftError:
    return UnsupportedError(f"weft tune needs '{error.name}': pip install 'weft-mesh[tune]'")
