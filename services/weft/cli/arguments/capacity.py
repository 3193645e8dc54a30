"""Arguments of the commands about capacity: ``plan`` and ``tune``."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.text.argument_types import not_negative, not_negative_integer, positive, positive_integer
from weft.cli.arguments.shared import add_json_argument
from weft.cli.arguments.types import graph_version, pair

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add them to the command line."""
    _add_plan(commands)
    _add_tune(commands)


def _add_plan(commands: "Commands") -> None:
    parser = commands.add_parser(
        "plan",
        help="tell what models need, how fast a device runs them, and where they go",
        description="Work out, from the files of models, the memory that each needs, its time at batch 1 and at the "
        "largest, what bounds it, and the largest batch or context that fits, on a device of a table, of a file, or on "
        "this machine, which is measured once. Then place the models on devices. Nothing is served.",
        epilog="example: weft plan minilm --device H100 --shape input_ids=128 --shape attention_mask=128 "
        "--shape token_type_ids=128 --rate minilm=2000 --cost-per-hour 2.5",
    )
    parser.add_argument(
        "models",
        nargs="*",
        metavar="MODEL",
        help="or a graph, for the models that it calls; default: all of the model service",
    )
    parser.add_argument(
        "--repository", type=Path, default=Path("model_repository"), metavar="DIR", help="default: model_repository"
    )
    parser.add_argument(
        "--device",
        default="this",
        metavar="NAME|FILE",
        help="a GPU such as H100, a TOML file with memory_gib, bandwidth_gb_per_s and tflops, or this machine: this "
        "(default)",
    )
    parser.add_argument("--num-devices", type=positive_integer, default=1, metavar="N", help="default: 1")
    parser.add_argument(
        "--batch", type=positive_integer, default=0, metavar="N", help="largest batch; default: that of the model"
    )
    parser.add_argument(
        "--shape",
        dest="shapes",
        action="append",
        default=[],
        type=pair,
        metavar="[MODEL.]INPUT=1x128",
        help="dims of an input without the batch, where the configuration leaves some open; may be repeated",
    )
    parser.add_argument(
        "--rate",
        dest="rates",
        action="append",
        default=[],
        type=model_rate,
        metavar="MODEL=REQ_PER_S",
        help="requests to be planned for; may be repeated",
    )
    parser.add_argument(
        "--declare",
        dest="declared",
        action="append",
        default=[],
        type=pair,
        metavar="MODEL=MIB:MS",
        help="memory of an instance and time of a row of a model whose files do not tell, such as a Python model",
    )
    language = parser.add_argument_group("language models")
    language.add_argument(
        "--context",
        type=positive_integer,
        default=0,
        metavar="N",
        help="tokens of a prompt and its answer; default: a quarter of what the model can have",
    )
    language.add_argument(
        "--output-tokens",
        dest="num_output_tokens",
        type=positive_integer,
        default=128,
        metavar="N",
        help="of them the answer's; default: 128",
    )
    parser.add_argument(
        "--cost-per-hour", type=not_negative, default=0.0, metavar="N", help="of a device, in any currency"
    )
    _add_placement(parser)
    add_json_argument(parser)


def _add_placement(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("placement")
    group.add_argument(
        "--fleet",
        type=Path,
        metavar="FILE",
        help="TOML file of the hosts that have the device, in place of --num-devices",
    )
    group.add_argument(
        "--replicas",
        action="append",
        default=[],
        type=model_replicas,
        metavar="MODEL=N",
        help="at least so many, in different failure domains; may be repeated",
    )
    group.add_argument(
        "--max-models",
        type=positive_integer,
        default=0,
        metavar="N",
        help="replicas that may share a device or a MIG slice by turns; default: 8, or all models if they are more",
    )
    group.add_argument("--save", type=Path, metavar="FILE", help="keep models, devices and placement in a JSON file")
    group.add_argument(
        "--check",
        type=Path,
        metavar="FILE",
        help="tell what moves of a saved plan; status 1 if something does, or does not fit",
    )
    group.add_argument(
        "--instance-groups",
        action="store_true",
        help="print the instance_group of config.pbtxt for each host and model",
    )
    group.add_argument(
        "--kubernetes", type=Path, metavar="FILE", help="write manifests that run the placement, as JSON"
    )


def _add_tune(commands: "Commands") -> None:
    parser = commands.add_parser(
        "tune",
        help="find the settings that serve a graph best on this machine",
        description="Search instances, batches, delays, length buckets, threads and processes of a graph's models on "
        "this machine, each trial a mesh of its own under load, and keep what is best within the latencies asked for. "
        "Nothing in the repository changes without --write.",
        epilog="example: weft tune embed --slo p99=50ms --data texts.jsonl --column TEXT=sentence",
    )
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


def model_replicas(text: str) -> tuple[str, int]:
    """MODEL=N."""
    name, number = pair(text)
    return name, positive_integer(number)


def model_rate(text: str) -> tuple[str, float]:
    """MODEL=REQ_PER_S."""
    name, rate = pair(text)
    return name, positive(rate)
