"""``weft batch``: a data set through a graph, into files."""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from weft_cli.arguments.types import pair
from weft_common.client.channels import MAX_TIMEOUT_S
from weft_common.client.v2_client import V2Client
from weft_common.errors import UnsupportedError
from weft_common.security.channel import channel_security
from weft_mesh.preflight import MeshError
from weft_mesh.running import running_mesh
from weft_tools.request import parameter_value

__all__ = ["pair", "run"]

_INTERRUPTED = 128 + signal.SIGINT
_MESH_LOG = ".mesh.log"


def run(options: argparse.Namespace) -> int:
    """Run the job and print what it came to; 0 if every row is written, 1 if the job ended before, 130 after Ctrl-C."""
    try:
        with _router(options) as url:
            asyncio.run(_batch(options, url))
    except MeshError as error:
        print(f"weft: {error}; the log is '{options.output / _MESH_LOG}'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("weft: interrupted; --resume goes on", file=sys.stderr)
        return _INTERRUPTED
    return 0


@contextlib.contextmanager
def _router(options: argparse.Namespace) -> Iterator[str]:
    """Address of the router: the one that is named, or that of a mesh for this job alone."""
    if options.url is not None:
        yield options.url
        return
    options.output.mkdir(parents=True, exist_ok=True)
    with (options.output / _MESH_LOG).open("a") as log, running_mesh(options.repository, log=log) as endpoints:
        yield endpoints["router"].grpc


async def _batch(options: argparse.Namespace, url: str) -> None:
    try:
        from weft_jobs.batch import BatchOptions, run_batch  # noqa: PLC0415  # pyarrow is an extra
        from weft_jobs.batch import Progress as JobProgress  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"weft batch needs '{error.name}': pip install 'weft[jobs]'") from error
    job = BatchOptions(
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
        rows_per_request=options.rows_per_request,
        rows_per_shard=options.rows_per_shard,
        max_inflight=options.max_inflight,
        max_failures=options.max_failures,
        timeout_s=min(options.timeout_ms / 1000, MAX_TIMEOUT_S),
        patience_s=options.patience_s,
    )
    start_s = time.perf_counter()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} rows, {task.fields[failed]} failed, {task.fields[speed]:,.0f} rows/s"),
        TimeElapsedColumn(),
    )
    async with V2Client(url, security=channel_security(options)) as client:
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(options.graph, total=None, failed=0, speed=0.0)

            def show(progress: JobProgress) -> None:
                own = progress.num_rows - progress.num_skipped
                speed = own / max(time.perf_counter() - start_s, 1e-9)
                bar.update(task, completed=progress.num_rows, failed=progress.num_failed, speed=speed)

            end = await run_batch(client, job, show)
    _print(end, time.perf_counter() - start_s, options.output, as_json=options.json)


def _print(end: "object", duration_s: float, output: Path, *, as_json: bool) -> None:
    facts = {**end._asdict(), "duration_s": round(duration_s, 3)}  # type: ignore[attr-defined]
    if as_json:
        print(json.dumps(facts))
        return
    own = facts["num_rows"] - facts["num_skipped"]
    print(
        f"{facts['num_rows']} rows in '{output}', {facts['num_failed']} of them failed"
        f"{' (failed/ says why)' if facts['num_failed'] else ''}; {own} in {duration_s:.1f} s, "
        f"{own / max(duration_s, 1e-9):,.0f} rows/s"
    )
