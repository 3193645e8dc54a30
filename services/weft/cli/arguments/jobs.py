"""Arguments of ``weft batch`` and ``weft stream``; imports nothing heavy."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import not_negative_integer, positive, positive_integer
from weft.cli.arguments.shared import add_json_argument, add_router_arguments
from weft.cli.arguments.types import pair, port

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]


def add_commands(commands: "Commands") -> None:
    """Add ``weft batch`` and ``weft stream``."""
    _add_batch(commands)
    _add_stream(commands)


def _add_batch(commands: "Commands") -> None:
    parser = commands.add_parser(
        "batch",
        help="run a data set through a graph, into files",
        description="Run every row of a data set through a graph or model, exactly once, into files. A job that was "
        "interrupted, however, goes on with --resume and ends with the same files.",
        epilog="example: weft batch embed --input 'texts/*.parquet' --output embeddings --keep id",
    )
    parser.add_argument("graph", metavar="GRAPH", help="graph or model; NAME/VERSION for one version")
    parser.add_argument(
        "--input",
        required=True,
        metavar="PATH",
        help="Parquet, JSON Lines or CSV, or images that are a row each: a file, folder or pattern; also s3://, gs:// "
        "and whatever else fsspec opens",
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="folder for the results")
    parser.add_argument("--resume", action="store_true", help="go on with the job in --output")
    _add_form(parser)
    _add_pace(parser)
    _add_engine(parser)
    parser.add_argument("--url", metavar="ADDRESS", help="router to use; default: a mesh of its own, in this job")
    parser.add_argument(
        "--repository",
        type=Path,
        default=Path("model_repository"),
        metavar="DIR",
        help="model repository of the job's own mesh; default: model_repository",
    )
    parser.add_argument(
        "--cost-per-hour",
        type=positive,
        metavar="N",
        help="what the machines of the job cost, in any currency; shows the cost of a million rows",
    )
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = parser.add_argument_group("engine")
    engine.add_argument(
        "--engine",
        default="embedded",
        choices=("embedded", "ray"),
        help="embedded: this process (default); ray: the machines of a Ray cluster, which share the files",
    )
    engine.add_argument(
        "--ray-address", default="", metavar="ADDRESS", help="default: RAY_ADDRESS, or a cluster of this machine alone"
    )
    engine.add_argument(
        "--ray-workers",
        type=positive_integer,
        default=0,
        metavar="N",
        help="processes that send requests, or load the models; default: one for each node",
    )
    engine.add_argument(
        "--in-process", action="store_true", help="each worker of Ray runs a mesh of its own from --repository"
    )


def _add_form(parser: argparse.ArgumentParser) -> None:
    form = parser.add_argument_group("columns and formats")
    form.add_argument(
        "--format",
        default="",
        choices=("parquet", "jsonl", "csv", "file"),
        help="default: by suffix; file: each is a row",
    )
    form.add_argument("--output-format", default="parquet", choices=("parquet", "jsonl"), help="default: parquet")
    form.add_argument(
        "--column",
        action="append",
        default=[],
        type=pair,
        metavar="INPUT=COLUMN[,COLUMN...]",
        help="column of an input, or several of scalars that make a list; default: that of the same name, none for an "
        "optional input",
    )
    form.add_argument("--write", action="append", default=[], metavar="OUTPUT", help="write only this; may be repeated")
    form.add_argument("--binary", action="append", default=[], metavar="OUTPUT", help="its bytes are no text")
    form.add_argument("--keep", action="append", default=[], metavar="COLUMN", help="write this column of the data too")
    form.add_argument(
        "--param", action="append", default=[], type=pair, metavar="NAME=VALUE", help="parameter of every request"
    )


def _add_pace(parser: argparse.ArgumentParser) -> None:
    pace = parser.add_argument_group("pace and failures")
    pace.add_argument(
        "--rows-per-request",
        type=positive_integer,
        default=0,
        metavar="N",
        help="default: the largest batch; at most 4 where models have priorities",
    )
    pace.add_argument(
        "--rows-per-shard",
        type=positive_integer,
        default=0,
        metavar="N",
        help="of a file of the output; default: 8192, fewer of rows above 16 KiB",
    )
    pace.add_argument(
        "--skip-bad-files",
        action="store_true",
        help="pass over files that cannot be read, and the rest of those that are damaged, with a word for each",
    )
    pace.add_argument(
        "--max-inflight", type=positive_integer, default=256, metavar="N", help="requests, at most; default: 256"
    )
    pace.add_argument(
        "--max-failures", type=not_negative_integer, metavar="N", help="end once more rows failed; default: never"
    )
    pace.add_argument(
        "--timeout-ms", type=positive, default=60_000.0, metavar="N", help="deadline of a request; default: 60000"
    )
    pace.add_argument(
        "--patience-s",
        type=positive,
        default=120.0,
        metavar="N",
        help="how long the mesh may be busy or away before the job ends; default: 120",
    )


def _add_stream(commands: "Commands") -> None:
    parser = commands.add_parser(
        "stream",
        help="run messages of a broker through a graph",
        description="Take messages from NATS JetStream, Redis Streams or Kafka, run each through a graph or model, and "
        "write the answers to a broker, at least once, until a signal ends it.",
        epilog="example: weft stream triage --from nats://127.0.0.1:4222/tickets --to nats://127.0.0.1:4222/answers",
    )
    parser.add_argument("graph", metavar="GRAPH", help="graph or model; NAME/VERSION for one version")
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SCHEME://HOST:PORT/TOPIC",
        help="messages; options of the broker behind ?: docs/jobs.md",
    )
    parser.add_argument("--to", required=True, metavar="SCHEME://HOST:PORT/TOPIC", help="answers")
    parser.add_argument(
        "--dead-letters",
        metavar="TOPIC",
        help="messages without an answer, at the broker of --from; default: TOPIC.dead",
    )
    parser.add_argument(
        "--group", default="weft", metavar="NAME", help="consumers that share the messages; default: weft"
    )
    parser.add_argument(
        "--order-by", default="", metavar="FIELD", help="answer messages with an equal value one after another"
    )
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        type=pair,
        metavar="INPUT=FIELD",
        help="default: the input's name",
    )
    parser.add_argument(
        "--write", action="append", default=[], metavar="OUTPUT", help="write only this; may be repeated"
    )
    parser.add_argument(
        "--keep", action="append", default=[], metavar="FIELD", help="write this field of the message too"
    )
    parser.add_argument(
        "--param", action="append", default=[], type=pair, metavar="NAME=VALUE", help="parameter of every request"
    )
    parser.add_argument(
        "--rows-per-request", type=positive_integer, default=0, metavar="N", help="default: the largest batch"
    )
    parser.add_argument(
        "--max-inflight", type=positive_integer, default=256, metavar="N", help="messages in work; default: 256"
    )
    parser.add_argument(
        "--max-deliveries",
        type=positive_integer,
        default=5,
        metavar="N",
        help="a message that was delivered more often is a dead letter; default: 5",
    )
    parser.add_argument(
        "--ack-wait-s",
        type=positive,
        default=30.0,
        metavar="N",
        help="the broker delivers a message again after so long without a sign of life; default: 30",
    )
    parser.add_argument(
        "--timeout-ms", type=positive, default=60_000.0, metavar="N", help="deadline of a request; default: 60000"
    )
    parser.add_argument(
        "--grace-s", type=positive, default=10.0, metavar="N", help="for what is in work at the end; default: 10"
    )
    parser.add_argument("--metrics-port", type=port, metavar="PORT", help="serve metrics there; 0: a free one")
    add_router_arguments(parser)
