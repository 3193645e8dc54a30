"""``weft batch``: a data set through a graph, into files."""

import argparse
import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as ProgressBar

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.security.arguments import add_channel_arguments
from weft.base.text.argument_types import add, not_negative_integer, positive, positive_integer
from weft.cli.arguments import add_json_argument, made, pair
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

_INTERRUPTED = 128 + signal.SIGINT
_WITH_FAILURES = 3
_MESH_LOG = ".mesh.log"
#: Of a job beside a mesh that others use too, which may be on this machine; see nice(1).
_NICENESS = 19
#: A mesh for one job: of the models in the repository it loads those that the job's requests reach.
_OWN_MESH = [f"--service-args={name}=--load-on-demand" for name in MODEL_SERVICES]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft batch``."""
    option = partial(add, parser)
    parser.description = (
        "Run every row of a data set through a graph or model, exactly once, into files. A job that was "
        "interrupted, however, goes on with --resume and ends with the same files."
    )
    parser.epilog = "example: weft batch embed --input 'texts/*.parquet' --output embeddings --keep id"
    option("graph GRAPH", "graph or model; NAME/VERSION for one version")
    option(
        "--input PATH",
        "Parquet, JSON Lines or CSV, or images that are a row each: a file, folder or pattern; also s3://, gs:// "
        "and whatever else fsspec opens",
        required=True,
    )
    option("--output DIR", "folder for the results", Path, required=True)
    option("--resume", "go on with the job in --output")
    _add_form(parser)
    _add_pace(parser)
    _add_engine(parser)
    option("--url ADDRESS", "router to use; default: a mesh of its own, in this job")
    option("--repository DIR (model_repository)", "model repository of the job's own mesh", Path)
    option(
        "--cost-per-hour N",
        "what the machines of the job cost, in any currency; shows the cost of a million rows",
        positive,
    )
    add_json_argument(parser)
    add_channel_arguments(parser.add_argument_group("security"))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    engine = partial(add, parser.add_argument_group("engine"))
    engine(
        "--engine",
        "embedded: this process (default); ray: the machines of a Ray cluster, which share the files",
        default="embedded",
        choices=("embedded", "ray"),
    )
    engine("--ray-address ADDRESS", "default: RAY_ADDRESS, or a cluster of this machine alone", default="")
    engine(
        "--ray-workers N",
        "processes that send requests, or load the models; default: one for each node",
        positive_integer,
        0,
    )
    engine("--in-process", "each worker of Ray runs a mesh of its own from --repository")


def _add_form(parser: argparse.ArgumentParser) -> None:
    form = partial(add, parser.add_argument_group("columns and formats"))
    form("--format", "default: by suffix; file: each is a row", default="", choices=("parquet", "jsonl", "csv", "file"))
    form("--output-format (parquet)", choices=("parquet", "jsonl"))
    form(
        "--column INPUT=COLUMN[,COLUMN...] ...",
        "column of an input, or several of scalars that make a list; default: that of the same name, none for an "
        "optional input",
        pair,
    )
    form("--write OUTPUT ...", "write only this; may be repeated")
    form("--binary OUTPUT ...", "its bytes are no text")
    form("--keep COLUMN ...", "write this column of the data too")
    form("--param NAME=VALUE ...", "parameter of every request", pair)


def _add_pace(parser: argparse.ArgumentParser) -> None:
    pace = partial(add, parser.add_argument_group("pace and failures"))
    pace(
        "--rows-per-request N",
        "default: the largest batch; at most 4 where models have priorities",
        positive_integer,
        0,
    )
    pace(
        "--rows-per-shard N", "of a file of the output; default: 8192, fewer of rows above 16 KiB", positive_integer, 0
    )
    pace(
        "--skip-bad-files",
        "pass over files that cannot be read, and the rest of those that are damaged, with a word for each",
    )
    pace("--max-inflight N (256)", "requests, at most", positive_integer)
    pace("--max-failures N", "end once more rows failed; default: never", not_negative_integer)
    pace("--timeout-ms N (60000)", "deadline of a request", positive)
    pace("--patience-s N (120)", "how long the mesh may be busy or away before the job ends", positive)


def run(options: argparse.Namespace) -> int:
    """Run the job and print its result.

    Returns:
        0 if every row is answered, 3 if some failed or files were skipped, 1 if the job ended early, 130 after Ctrl-C.
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
    """Reject combinations of options without meaning."""
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


def _embedded(options: argparse.Namespace, display: "BatchDisplay") -> "Progress":
    from weft.jobs.batch import run_batch  # noqa: PLC0415  # pyarrow is an extra

    job = _job(options)

    async def run_there(url: str) -> "Progress":
        async with V2Client(url, security=channel_security(options)) as client:
            with display.bar() as show:
                return await run_batch(client, job, show)

    with _router(options) as url:
        return asyncio.run(run_there(url))


def _on_ray(options: argparse.Namespace, display: "BatchDisplay") -> "Progress":
    from weft.jobs.ray_engine import run_batch_on_ray  # noqa: PLC0415  # Ray is an extra

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

    return made(
        BatchOptions,
        options,
        column_of=dict(options.column),
        outputs=options.write,
        parameters={name: parameter_value(value) for name, value in options.param},
        is_alone=options.url is None,
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
    )


@contextmanager
def _router(options: argparse.Namespace) -> Iterator[str]:
    """Address of the router: the given one, or that of a mesh started for this job."""
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
    """A client of a mesh that runs in one process until this process is done with it."""
    path = output / f".mesh-{socket.gethostname()}-{os.getpid()}.log"
    try:
        with path.open("a") as log, running_mesh(repository, [*_OWN_MESH, "--in-process"], log=log) as endpoints:
            async with V2Client(endpoints["router"].grpc) as client:
                yield client
    except MeshError as error:
        raise UnavailableError(f"{error}; the log is '{path}'") from error


class BatchDisplay:
    """Shows a job.

    Args:
        cost_per_hour: Of the machines; None: not known.
    """

    def __init__(self, graph: str, console: Console, cost_per_hour: float | None, clock_s: Callable[[], float]) -> None:
        self._graph = graph
        self._console = console
        self._cost_per_hour = cost_per_hour
        self._clock_s = clock_s
        self._start_s = clock_s()

    @contextmanager
    def bar(self) -> Iterator[Callable[["Progress"], None]]:
        """Show a progress bar for a ``with`` block; yields the function that updates it."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:.0f}%"),
            TextColumn("{task.fields[state]}"),
            TimeElapsedColumn(),
        )
        with ProgressBar(*columns, console=self._console, transient=True) as bar:
            task: TaskID = bar.add_task(self._graph, total=1.0, state="")

            def show(progress: "Progress") -> None:
                bar.update(task, completed=progress.share + progress.share_open, state=self.state(progress))

            yield show

    def state(self, progress: "Progress") -> str:
        """Rows, failures, speed, time left and cost as one text."""
        facts = self.facts(progress)
        parts = [
            f"{progress.num_rows + progress.num_open:,} rows",
            f"{progress.num_failed:,} failed",
            f"{facts['rows_per_s']:,.0f} rows/s",
        ]
        remaining_s = progress.remaining_s(facts["duration_s"])
        if remaining_s is not None:
            parts.append(f"{timedelta(seconds=round(remaining_s))} left")
        return ", ".join([*parts, *self._cost(facts)])

    def end(self, progress: "Progress", output: str) -> str:
        """The last line of a job."""
        facts = self.facts(progress)
        failed = f"{progress.num_failed} of them failed{' (failed/ says why)' if progress.num_failed else ''}"
        if progress.num_bad_files:
            failed += f", {progress.num_bad_files} files were passed over"
        own = progress.num_rows - progress.num_skipped
        pace = [f"{own} in {facts['duration_s']:.1f} s", f"{facts['rows_per_s']:,.0f} rows/s", *self._cost(facts)]
        return f"{progress.num_rows} rows in '{output}', {failed}; {', '.join(pace)}"

    def facts(self, progress: "Progress") -> dict[str, Any]:
        """The numbers: counts of rows, seconds, rows a second, and what a million rows cost if that is known."""
        duration_s = max(self._clock_s() - self._start_s, 1e-9)
        own = progress.num_rows + progress.num_open - progress.num_skipped
        facts: dict[str, Any] = {
            "num_rows": progress.num_rows,
            "num_failed": progress.num_failed,
            "num_skipped": progress.num_skipped,
            "num_bad_files": progress.num_bad_files,
            "window": progress.window,
            "duration_s": round(duration_s, 3),
            "rows_per_s": round(own / duration_s, 3),
        }
        if self._cost_per_hour is not None:
            cost = self._cost_per_hour * duration_s / 3600
            facts |= {"cost": cost, "cost_per_million_rows": cost / own * 1e6 if own else None}
        return facts

    @staticmethod
    def _cost(facts: dict[str, Any]) -> list[str]:
        cost = facts.get("cost_per_million_rows")
        return [] if cost is None else [f"{cost:,.4g} per million rows"]
