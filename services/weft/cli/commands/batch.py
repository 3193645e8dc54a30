"""``weft batch``: a data set through a graph, into files."""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from weft.base.errors import InvalidArgumentError, UnavailableError, UnsupportedError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import not_negative_integer, positive, positive_integer
from weft.cli.argument_types import pair
from weft.cli.arguments import add_json_argument
from weft.cli.batch_display import BatchDisplay
from weft.mesh.preflight import MeshError
from weft.mesh.running import running_mesh
from weft.mesh.service_names import MODEL_SERVICES
from weft.tools.request import parameter_value
from weft.v2.client.channels import MAX_TIMEOUT_S
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import ChannelSecurity, channel_security

if TYPE_CHECKING:
    from weft.jobs.batch import BatchOptions, Progress
    from weft.jobs.ray_engine import OpenClient

__all__ = ["pair", "run"]

_INTERRUPTED = 128 + signal.SIGINT
_WITH_FAILURES = 3
_MESH_LOG = ".mesh.log"
#: Of a job beside a mesh that others use too, which may be on this machine; see nice(1).
_NICENESS = 19
#: A mesh for one job: of the models in the repository it loads those that the job's requests reach.
_OWN_MESH = [f"--service-args={name}=--load-on-demand" for name in MODEL_SERVICES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft batch``."""
    parser.description = (
        "Run every row of a data set through a graph or model, exactly once, into files. A job that was "
        "interrupted, however, goes on with --resume and ends with the same files."
    )
    parser.epilog = "example: weft batch embed --input 'texts/*.parquet' --output embeddings --keep id"
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


def run(options: argparse.Namespace) -> int:
    """Run the job and print what it came to.

    Returns:
        0 if every row is answered, 3 if some failed or files were passed over, 1 if the job ended before, 130 after
        Ctrl-C.
    """
    _check(options)
    display = BatchDisplay(options.graph, Console(stderr=True), options.cost_per_hour, time.monotonic)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        end = _on_ray(options, display) if options.engine == "ray" else _embedded(options, display)
    except MeshError as error:
        print(f"weft: {error}; the log is '{options.output / _MESH_LOG}'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("weft: interrupted; --resume goes on", file=sys.stderr)
        return _INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    print(json.dumps(display.facts(end)) if options.json else display.end(end, str(options.output)))
    return _WITH_FAILURES if end.num_failed or end.num_bad_files else 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that say nothing together."""
    if options.engine != "ray":
        for name in ("ray_address", "ray_workers", "in_process"):
            if getattr(options, name):
                raise InvalidArgumentError(f"--{name.replace('_', '-')} is for --engine ray")
    elif options.in_process and options.url is not None:
        raise InvalidArgumentError("--in-process runs the models in Ray's workers; leave --url out, or --in-process")
    elif not options.in_process and options.url is None and (options.ray_address or os.environ.get("RAY_ADDRESS")):
        raise InvalidArgumentError(
            "a cluster of Ray needs --url, a router that all its machines reach, or --in-process, by which its workers "
            "run the models"
        )


def _embedded(options: argparse.Namespace, display: BatchDisplay) -> "Progress":
    try:
        from weft.jobs.batch import run_batch  # noqa: PLC0415  # pyarrow is an extra
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"weft batch needs '{error.name}': pip install 'weft-mesh[jobs]'") from error
    job = _job(options)

    async def run_there(url: str) -> "Progress":
        async with V2Client(url, security=channel_security(options)) as client:
            with display.bar() as show:
                return await run_batch(client, job, show)

    with _router(options) as url:
        return asyncio.run(run_there(url))


def _on_ray(options: argparse.Namespace, display: BatchDisplay) -> "Progress":
    try:
        from weft.jobs.ray_engine import run_batch_on_ray  # noqa: PLC0415  # Ray is an extra
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"weft batch --engine ray needs '{error.name}': pip install 'weft-mesh[ray]'") from error
    job = _job(options)

    def run_there(open_client: "OpenClient") -> "Progress":
        with display.bar() as show:
            return run_batch_on_ray(
                open_client, job, show, address=options.ray_address, num_workers=options.ray_workers
            )

    if options.in_process:
        options.output.mkdir(parents=True, exist_ok=True)
        return run_there(partial(_client_of_own_mesh, options.repository.resolve(), options.output.resolve()))
    with _router(options) as url:
        return run_there(partial(_client, url, channel_security(options)))


def _job(options: argparse.Namespace) -> "BatchOptions":
    from weft.jobs.batch import BatchOptions  # noqa: PLC0415  # pyarrow is an extra

    return BatchOptions(
        graph=options.graph,
        input=options.input,
        output=options.output,
        resume=options.resume,
        format=options.format,
        output_format=options.output_format,
        column_of=dict(options.column),
        outputs=options.write,
        binary=options.binary,
        keep=options.keep,
        parameters={name: parameter_value(value) for name, value in options.param},
        is_alone=options.url is None,
        rows_per_request=options.rows_per_request,
        rows_per_shard=options.rows_per_shard,
        skip_bad_files=options.skip_bad_files,
        max_inflight=options.max_inflight,
        max_failures=options.max_failures,
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
        patience_s=options.patience_s,
    )


@contextmanager
def _router(options: argparse.Namespace) -> Iterator[str]:
    """Address of the router: the one that is named, or that of a mesh for this job alone."""
    if options.url is not None:
        os.nice(_NICENESS)
        yield options.url
        return
    options.output.mkdir(parents=True, exist_ok=True)
    with (
        (options.output / _MESH_LOG).open("a") as log,
        running_mesh(options.repository, _OWN_MESH, log=log) as endpoints,
    ):
        yield endpoints["router"].grpc


@asynccontextmanager
async def _client(url: str, security: ChannelSecurity | None) -> AsyncIterator[V2Client]:
    async with V2Client(url, security=security) as client:
        yield client


@asynccontextmanager
async def _client_of_own_mesh(repository: Path, output: Path) -> AsyncIterator[V2Client]:
    """A client of a mesh that runs in one process, for as long as this process needs it."""
    path = output / f".mesh-{socket.gethostname()}-{os.getpid()}.log"
    try:
        with path.open("a") as log, running_mesh(repository, [*_OWN_MESH, "--in-process"], log=log) as endpoints:
            async with V2Client(endpoints["router"].grpc) as client:
                yield client
    except MeshError as error:
        raise UnavailableError(f"{error}; the log is '{path}'") from error
