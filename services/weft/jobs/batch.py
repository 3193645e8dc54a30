"""``weft batch``: runs every row of a data set through a graph or model, into files, exactly once.

``run_batch`` runs a job in this process; the Ray engine shares its options, plan and the work on one shard.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from weft.base.core import Parameters
from weft.base.errors import InvalidArgumentError, WeftError
from weft.base.observing.logs import get_logger
from weft.jobs.atomic_files import held
from weft.jobs.dataset import Dataset, Shard
from weft.jobs.layout import Layout, make_layout
from weft.jobs.output import Checkpoints, FailedRow, Journal, OutputFolder, begin, begun_with
from weft.jobs.readers import CONTENT_COLUMN
from weft.jobs.shard import first_error, run_shard
from weft.jobs.target import Identity, JobTarget
from weft.jobs.window import Window
from weft.v2.client.v2_client import V2Client

_log = get_logger("weft.jobs")

#: Shards in work at once, so that the last requests of one do not leave the servers idle.
MAX_OPEN_SHARDS = 3
_FORMAT = 2
#: Rows of a request beside requests that go first, unless the job says how many.
_POLITE_ROWS = 4
#: Rows of a shard unless the job says how many: fewer, where these need more memory.
_ROWS_PER_SHARD, _SHARD_BYTES = 8192, 128 << 20
#: Least time between two reports of rows in a shard, in seconds.
_TELL_S = 0.5


@dataclass(frozen=True)
class BatchOptions:
    """Options of a job.

    Attributes:
        graph: Graph or model; NAME/VERSION for one version.
        format: Of the data set; "": by suffix.
        output_format: ``parquet`` or ``jsonl``.
        column_of: Column of an input, if named differently; an optional input is filled only if it is here.
        outputs: Those to write; none: all.
        binary: Outputs of BYTES that are not text.
        keep: Columns of the data set to write beside the answers.
        is_alone: No one else uses the mesh, so requests need not give way.
        rows_per_request: 0: as in the job to resume, else the largest batch of the graph, or 1; at most 4 if models
            have priorities, since running requests are not interrupted.
        rows_per_shard: Rows of an output file. 0: as in the job to resume, else 8192, fewer if rows are large.
        skip_bad_files: Skip files that cannot be read, and the rest of damaged ones.
        max_failures: The job ends once more rows have failed; None: no limit.
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
    is_alone: bool = False
    rows_per_request: int = 0
    rows_per_shard: int = 0
    skip_bad_files: bool = False
    max_inflight: int = 256
    max_failures: int | None = None
    timeout_s: float = 60.0
    patience_s: float = 120.0


class Progress(NamedTuple):
    """Progress of a job.

    Attributes:
        num_rows: Rows written, as answers or failures.
        num_skipped: Rows done before the job was resumed.
        share: Share of the data set that is written, from 0 to 1; estimated by the bytes read.
        share_skipped: Share done before the job was resumed.
        num_open: Answered rows of unfinished shards.
        share_open: Like ``share``, of these.
        num_bad_files: Files skipped, in whole or in part.
    """

    num_rows: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    window: int = 0
    share: float = 0.0
    share_skipped: float = 0.0
    num_open: int = 0
    share_open: float = 0.0
    num_bad_files: int = 0

    def plus(
        self, num_rows: int, share: float, *, num_failed: int = 0, num_skipped: int = 0, window: int | None = None
    ) -> "Progress":
        """Add the rows of a shard, some of which may have been answered before the job was resumed."""
        return self._replace(
            num_rows=self.num_rows + num_rows,
            num_failed=self.num_failed + num_failed,
            num_skipped=self.num_skipped + num_skipped,
            window=self.window if window is None else window,
            share=min(self.share + share, 1.0),
            share_skipped=min(self.share_skipped + share * num_skipped / num_rows, 1.0),
        )

    def remaining_s(self, duration_s: float) -> float | None:
        """Estimated seconds left, at the speed since the job began or was resumed; None if unknown."""
        share = self.share + self.share_open
        done = share - self.share_skipped
        return duration_s * (1.0 - share) / done if done > 0 else None


async def run_batch(
    client: V2Client, options: BatchOptions, on_progress: Callable[[Progress], None] | None = None
) -> Progress:
    """Run a job until every row is written.

    The job can be resumed at any moment, also after a crash or a cancellation: finished shards stay, the rest is done
    again, and the files are those of an uninterrupted job. ``on_progress`` is called after each shard, and every half
    second in which a row is answered.

    Raises:
        WeftError: The job cannot begin, or go on.
        OSError: A file cannot be read or written.
    """
    target, plan = await plan_job(client, options)
    with held(options.output):
        dataset, plan = await asyncio.to_thread(open_dataset, options, plan)
        folder = OutputFolder(options.output, options.output_format, plan.layout.schema)
        await asyncio.to_thread(begin_job, options, plan, dataset, folder)
        shards = dataset.shards(plan.rows_per_shard, plan.layout.columns, folder.is_done)
        num_failed = folder.num_failed()
        job = _Job(folder, shards, Progress(num_failed=num_failed), on_progress)
        end = await job.run(ShardWorker(options, target, plan, folder, num_failed, job.on_rows))
        return end._replace(num_bad_files=len(dataset.bad_files))


@dataclass
class _Job:
    folder: OutputFolder
    shards: Iterator[Shard]
    progress: Progress
    on_progress: Callable[[Progress], None] | None
    #: Rows of open shards that are answered, and those of them that were before.
    open: dict[Shard, tuple[int, int]] = field(default_factory=dict)
    told_s: float = 0.0

    def on_rows(self, shard: Shard, num_rows: int, num_restored: int) -> None:
        """Count answered rows of a shard in progress."""
        self.open[shard] = num_rows, num_restored
        now_s = time.monotonic()
        if now_s - self.told_s >= _TELL_S:
            self.told_s = now_s
            self._tell(self.progress)

    async def run(self, worker: "ShardWorker") -> Progress:
        open_shards = asyncio.Semaphore(MAX_OPEN_SHARDS)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await open_shards.acquire()
                    shard = await asyncio.to_thread(next, self.shards, None)
                    if shard is None:
                        break
                    if self.folder.is_done(shard.index):
                        self._tell(self.progress.plus(shard.num_rows, shard.share, num_skipped=shard.num_rows))
                        open_shards.release()
                        continue
                    task = group.create_task(self._run(worker, shard))
                    task.add_done_callback(lambda _: open_shards.release())
        except* (WeftError, OSError) as group_error:
            raise first_error(group_error) from None
        return self.progress

    async def _run(self, worker: "ShardWorker", shard: Shard) -> None:
        failed = await worker.run(shard)
        _, num_restored = self.open.pop(shard, (0, 0))
        numbers = {"num_failed": len(failed), "num_skipped": num_restored, "window": worker.window}
        self._tell(self.progress.plus(shard.num_rows, shard.share, **numbers))

    def _tell(self, progress: Progress) -> None:
        num_open = sum(num_rows - num_restored for num_rows, num_restored in self.open.values())
        share_open = sum(shard.share * num_rows / shard.num_rows for shard, (num_rows, _) in self.open.items())
        self.progress = progress = progress._replace(num_open=num_open, share_open=share_open)
        if self.on_progress is not None:
            self.on_progress(progress)


class JobPlan(NamedTuple):
    """The graph of a job and the layout of its columns.

    Attributes:
        yields: Whether its requests give way to those of better priority.
        rows_per_shard: Rows of a shard; 0: unknown before ``open_dataset``.
    """

    identity: Identity
    layout: Layout
    yields: bool
    rows_per_shard: int

    def manifest(self, options: BatchOptions, dataset: Dataset) -> dict[str, Any]:
        """Everything that the rows of the output depend on."""
        return {
            "format": _FORMAT,
            "graph": options.graph.partition("/")[0],
            "version": self.identity.signature.version,
            "lock": self.identity.digest,
            "files": [asdict(file) for file in dataset.files],
            "columns": dict(self.layout.column_of),
            "outputs": self.layout.schema.names,
            "binary": sorted(self.layout.binary),
            "output_format": options.output_format,
            "parameters": dict(options.parameters),
            "rows_per_request": self.layout.rows_per_request,
            "rows_per_shard": self.rows_per_shard,
            "kept": {name: str(type) for name, type in self.layout.kept_types.items()},
        }


async def plan_job(client: V2Client, options: BatchOptions) -> tuple[JobTarget, JobPlan]:
    """Identify the graph, and lay out the columns.

    Returns:
        The target of the requests, with the lowest priority that all models know, and the plan.

    Raises:
        WeftError: The graph, or an option, is unsuitable for a job.
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
    rows_per_request, rows_per_shard = options.rows_per_request, options.rows_per_shard
    if options.resume and (begun := begun_with(options.output, name)) is not None:
        await target.is_still(begun[0])  # waits for a mesh that starts
        rows_per_request, rows_per_shard = rows_per_request or begun[1], rows_per_shard or begun[2]
    identity = await target.identify()
    yields = not options.is_alone and await target.yield_to_others()
    if yields and not rows_per_request:
        rows_per_request = min(_POLITE_ROWS, max(identity.signature.max_batch_size, 1))
    layout = make_layout(
        identity.signature,
        column_of=options.column_of,
        outputs=options.outputs,
        binary=options.binary,
        keep=options.keep,
        rows_per_request=rows_per_request,
    )
    return target, JobPlan(identity, layout, yields, rows_per_shard)


def open_dataset(options: BatchOptions, plan: JobPlan) -> tuple[Dataset, JobPlan]:
    """Inspect every file of the data set; reads from disk.

    Returns:
        The data set, and the plan completed from it: types, rows of a shard, the content column of files that are rows.

    Raises:
        NotFoundError, InvalidArgumentError, OSError: As of ``Dataset`` and ``Dataset.look``.
    """
    dataset, layout = Dataset(options.input, options.format), plan.layout
    if dataset.is_of_row_files and len(layout.inputs) == 1 and layout.inputs[0].name not in options.column_of:
        layout = replace(layout, column_of={layout.inputs[0].name: CONTENT_COLUMN})
    look = dataset.look(layout.columns, skips_bad=options.skip_bad_files)
    for path, message in dataset.bad_files.items():
        _log.warning("'%s' is passed over: %s", path, message)
    layout = replace(layout, kept_types={name: type for name in layout.keep if (type := look.types[name]) is not None})
    outputs_bytes = sum(max(spec.row_bytes, 0) for spec in layout.outputs)
    fitting = int(_SHARD_BYTES / max(look.row_bytes + outputs_bytes, 1.0))
    rows = plan.rows_per_shard or max(1, min(_ROWS_PER_SHARD, fitting))
    return dataset, plan._replace(layout=layout, rows_per_shard=rows)


def begin_job(options: BatchOptions, plan: JobPlan, dataset: Dataset, folder: OutputFolder) -> None:
    """Write the manifest of a new job, or resume the one in the folder; reads from disk.

    If files of the data set have changed since, shards from the first of them on are done again.

    Raises:
        WeftError, OSError: As of ``begin``.
    """
    checkpoints = Checkpoints(options.output)
    if not options.resume:
        checkpoints.clear()

    def forget(num_same: int) -> None:
        first = dataset.num_shards(num_same, plan.rows_per_shard)
        num_removed = folder.remove_from(first)
        checkpoints.clear(first)
        _log.warning(
            "files of the data set have changed since the job was begun: of the shards that were done %d stay, and %d "
            "are done anew",
            first,
            num_removed,
        )

    begin(options.output, plan.manifest(options, dataset), resume=options.resume, on_changed_files=forget)
    folder.remove_unfinished()


@dataclass
class ShardWorker:
    """Answers and writes shards, several at once; owned by one event loop.

    Attributes:
        num_failed: Rows that failed earlier.
        on_rows: Called with a shard, its number of answered rows, and how many of these were answered before this
            worker.
    """

    options: BatchOptions
    target: JobTarget
    plan: JobPlan
    folder: OutputFolder
    num_failed: int
    on_rows: Callable[[Shard, int, int], None] = lambda shard, num_rows, num_restored: None

    def __post_init__(self) -> None:
        self._checkpoints = Checkpoints(self.options.output, self.folder.writer)
        self._window = Window(self.options.max_inflight, time.monotonic_ns, yields=self.plan.yields)

    @property
    def window(self) -> int:
        """Requests that may be in flight now."""
        return self._window.limit

    async def run(self, shard: Shard) -> list[FailedRow]:
        """Answer the rows of a shard and write them; return the failed ones.

        Raises:
            WeftError: Too many rows have failed, the graph has changed, or no request can be answered.
            OSError: The shard cannot be written.
        """
        journal = Journal(self._checkpoints, shard.index, self._check_same, partial(self.on_rows, shard))
        result = await run_shard(shard, self.plan.layout, self.target.infer, self._window, journal)
        check_failures(self.options, self.num_failed, result.failed)
        await self._check_same()
        await asyncio.to_thread(self.folder.write, shard.index, result.columns, result.failed)
        await asyncio.to_thread(self._checkpoints.remove, shard.index)
        self.num_failed += len(result.failed)
        return result.failed

    async def _check_same(self) -> None:
        """Raise InvalidArgumentError if the graph has changed: rows may then be of either."""
        if not await self.target.is_still(self.plan.identity.digest):
            raise InvalidArgumentError(
                f"'{self.options.graph}', or a model behind it, has changed while the job ran; put it back and "
                "--resume, or begin again in another folder"
            )


def check_failures(options: BatchOptions, num_failed: int, failed: Sequence[FailedRow]) -> None:
    """Raise InvalidArgumentError if more rows have failed, including ``num_failed`` earlier ones, than allowed."""
    limit = options.max_failures
    if limit is not None and failed and num_failed + len(failed) > limit:
        first = failed[0]
        raise InvalidArgumentError(
            f"more than {limit} rows failed, the last of them row {first.row} of '{first.file}': {first.status}: "
            f"{first.message}; mend the cause and --resume, or raise --max-failures"
        )
