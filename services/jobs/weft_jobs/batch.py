"""A batch job: every row of a data set through a graph or model, into files, exactly once: ``run_batch``."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weft_common.client.v2_client import V2Client
from weft_common.core import Parameters
from weft_common.errors import InternalError, InvalidArgumentError, WeftError
from weft_common.tensors import Array
from weft_jobs.atomic_files import held
from weft_jobs.columns import InputValues
from weft_jobs.dataset import Dataset, Shard
from weft_jobs.layout import Layout, make_layout
from weft_jobs.output import OutputFolder, begin, lock_of
from weft_jobs.shard import ShardResult, run_shard
from weft_jobs.target import Identity, JobTarget
from weft_jobs.window import Window

#: Shards in work at once, so that the last requests of one do not leave the servers idle.
_MAX_OPEN_SHARDS = 3
_FORMAT = 1


@dataclass(frozen=True)
class BatchOptions:
    """What a job is to do.

    Attributes:
        graph: Graph or model; NAME/VERSION for one version.
        input: Path or pattern of the data set.
        output: Folder of the results.
        resume: Go on with the job there.
        format: Of the data set; "": by suffix.
        output_format: ``parquet`` or ``jsonl``.
        column_of: Column of an input, where it has another name; an optional input is filled only if it is here.
        outputs: Those to write; none: all.
        binary: Outputs of BYTES that are no text.
        keep: Columns of the data set to write beside the answers.
        parameters: Of every request.
        rows_per_request: 0: the largest batch of the graph, 1 if it has none.
        rows_per_shard: Rows of a file of the output.
        max_inflight: Requests in flight at most.
        max_failures: The job ends once more rows have failed; None: never for that.
        timeout_s: Of one request.
        patience_s: How long the mesh may be busy or away before the job ends.
    """

    graph: str
    input: str
    output: Path
    resume: bool = False
    format: str = ""
    output_format: str = "parquet"
    column_of: Mapping[str, str] = field(default_factory=dict)
    outputs: Sequence[str] = ()
    binary: Sequence[str] = ()
    keep: Sequence[str] = ()
    parameters: Parameters = field(default_factory=dict)
    rows_per_request: int = 0
    rows_per_shard: int = 8192
    max_inflight: int = 256
    max_failures: int | None = None
    timeout_s: float = 60.0
    patience_s: float = 120.0


class Progress(NamedTuple):
    """How far a job is.

    Attributes:
        num_rows: Rows that are written, as answers or failures.
        num_failed: Those that failed.
        num_skipped: Rows that were done before the job was resumed.
        window: Requests that may be in flight.
    """

    num_rows: int
    num_failed: int
    num_skipped: int
    window: int


async def run_batch(
    client: V2Client, options: BatchOptions, on_progress: Callable[[Progress], None] | None = None
) -> Progress:
    """Run a job until every row is written.

    At any moment, also after a crash, the job can be resumed: what is written stays, the rest is done again, and the
    files are those of a job that was never interrupted. Cancelling leaves it in that state too.

    Args:
        client: To the router, or to any V2 server.
        options: What to do.
        on_progress: Called after each shard.

    Returns:
        How far it came, which is the end.

    Raises:
        WeftError: The job cannot begin, or go on.
        OSError: A file cannot be read or written.
    """
    name, _, version = options.graph.partition("/")
    target = JobTarget(
        client,
        name,
        version,
        parameters=options.parameters,
        outputs=options.outputs,
        timeout_s=options.timeout_s,
        patience_s=options.patience_s,
        clock_s=time.monotonic,
    )
    if options.resume and (lock := lock_of(options.output, name)):
        await target.is_still(lock)  # waits for a mesh that starts
    identity = await target.identify()
    await target.yield_to_others()
    layout = make_layout(
        identity.signature,
        column_of=options.column_of,
        outputs=options.outputs,
        binary=options.binary,
        keep=options.keep,
        rows_per_request=options.rows_per_request,
    )
    with held(options.output):
        dataset = await asyncio.to_thread(Dataset, options.input, options.format)
        begin(options.output, _manifest(options, layout, identity, dataset), resume=options.resume)
        folder = OutputFolder(options.output, options.output_format, layout.schema)
        shards = dataset.shards(options.rows_per_shard, layout.columns)
        return await _Job(options, target, identity, layout, folder, shards, on_progress).run()


class _Job:
    def __init__(
        self,
        options: BatchOptions,
        target: JobTarget,
        identity: Identity,
        layout: Layout,
        folder: OutputFolder,
        shards: Iterator[Shard],
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._options = options
        self._target = target
        self._identity = identity
        self._layout = layout
        self._folder = folder
        self._shards = shards
        self._on_progress = on_progress
        self._window = Window(options.max_inflight, time.monotonic_ns)
        self._num_rows = self._num_skipped = 0
        self._num_failed = folder.num_failed()

    async def run(self) -> Progress:
        open_shards = asyncio.Semaphore(_MAX_OPEN_SHARDS)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await open_shards.acquire()
                    shard = await asyncio.to_thread(next, self._shards, None)
                    if shard is None:
                        break
                    if self._folder.is_done(shard.index):
                        self._num_skipped += shard.num_rows
                        self._tell(shard.num_rows)
                        open_shards.release()
                        continue
                    task = group.create_task(self._run(shard))
                    task.add_done_callback(lambda _: open_shards.release())
        except* (WeftError, OSError) as group_error:
            raise _first(group_error) from None
        return self._progress()

    async def _run(self, shard: Shard) -> None:
        result = await run_shard(shard, self._layout, self._send)
        limit = self._options.max_failures
        if limit is not None and self._num_failed + len(result.failed) > limit:
            first = result.failed[0]
            raise InvalidArgumentError(
                f"more than {limit} rows failed, the last of them row {first.row} of '{first.file}': {first.status}: "
                f"{first.message}; mend the cause and --resume, or raise --max-failures"
            )
        await self._write(shard, result)
        self._num_failed += len(result.failed)
        self._tell(shard.num_rows)

    async def _write(self, shard: Shard, result: ShardResult) -> None:
        """Write the shard, unless the graph is another by now: then its rows may be of either."""
        if not await self._target.is_still(self._identity.digest):
            raise InvalidArgumentError(
                f"'{self._options.graph}', or a model behind it, has changed while the job ran; put it back and "
                "--resume, or begin again in another folder"
            )
        await asyncio.to_thread(self._folder.write, shard.index, result.columns, result.failed)

    async def _send(self, inputs: Mapping[str, InputValues], rows: Sequence[int]) -> dict[str, Array]:
        async with self._window.place() as place:
            return await self._target.infer(self._layout.tensors(inputs, rows), place.refused)

    def _tell(self, num_rows: int) -> None:
        self._num_rows += num_rows
        if self._on_progress is not None:
            self._on_progress(self._progress())

    def _progress(self) -> Progress:
        return Progress(self._num_rows, self._num_failed, self._num_skipped, self._window.limit)


def _manifest(options: BatchOptions, layout: Layout, identity: Identity, dataset: Dataset) -> dict[str, Any]:
    """All that the rows of the output depend on."""
    return {
        "format": _FORMAT,
        "graph": options.graph.partition("/")[0],
        "version": identity.signature.version,
        "lock": identity.digest,
        "files": [asdict(file) for file in dataset.files],
        "columns": dict(layout.column_of),
        "outputs": layout.schema.names,
        "binary": sorted(layout.binary),
        "output_format": options.output_format,
        "parameters": dict(options.parameters),
        "rows_per_request": layout.rows_per_request,
        "rows_per_shard": options.rows_per_shard,
    }


def _first(group: BaseExceptionGroup[Any]) -> Exception:
    """The first error of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else InternalError(str(error))
