"""A batch job: every row of a data set through a graph or model, into files, exactly once: ``run_batch``."""

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

from weft.base.errors import InternalError, WeftError
from weft.jobs.atomic_files import held
from weft.jobs.dataset import Shard
from weft.jobs.job import (
    MAX_OPEN_SHARDS,
    BatchOptions,
    Progress,
    ShardWorker,
    begin_job,
    open_dataset,
    plan_job,
)
from weft.jobs.output import OutputFolder
from weft.v2.client.v2_client import V2Client

#: Least time between two reports of rows in a shard, in seconds.
_TELL_S = 0.5

__all__ = ["BatchOptions", "Progress", "run_batch"]


async def run_batch(
    client: V2Client, options: BatchOptions, on_progress: Callable[[Progress], None] | None = None
) -> Progress:
    """Run a job until every row is written.

    At any moment, also after a crash, the job can be resumed: what is written stays, the rest is done again, and the
    files are those of a job that was never interrupted. Cancelling leaves it in that state too. ``on_progress`` is
    called after each shard, and while one is in work every half second in which a row is answered.

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
        job = _Job(folder, shards, folder.num_failed(), on_progress)
        end = await job.run(ShardWorker(options, target, plan, folder, folder.num_failed(), job.on_rows))
        return end._replace(num_bad_files=len(dataset.bad_files))


class _Job:
    def __init__(
        self,
        folder: OutputFolder,
        shards: Iterator[Shard],
        num_failed: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._folder = folder
        self._shards = shards
        self._on_progress = on_progress
        self._progress = Progress(0, num_failed, 0, 0)
        self._open: dict[Shard, tuple[int, int]] = {}  # rows that are answered, and those of them that were before
        self._told_s = 0.0

    def on_rows(self, shard: Shard, num_rows: int, num_restored: int) -> None:
        """Some rows of a shard in work are answered."""
        self._open[shard] = num_rows, num_restored
        now_s = time.monotonic()
        if now_s - self._told_s >= _TELL_S:
            self._told_s = now_s
            self._tell(self._progress)

    async def run(self, worker: ShardWorker) -> Progress:
        open_shards = asyncio.Semaphore(MAX_OPEN_SHARDS)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await open_shards.acquire()
                    shard = await asyncio.to_thread(next, self._shards, None)
                    if shard is None:
                        break
                    if self._folder.is_done(shard.index):
                        self._tell(self._progress.plus(shard.num_rows, shard.share, num_skipped=shard.num_rows))
                        open_shards.release()
                        continue
                    task = group.create_task(self._run(worker, shard))
                    task.add_done_callback(lambda _: open_shards.release())
        except* (WeftError, OSError) as group_error:
            raise first_error(group_error) from None
        return self._progress

    async def _run(self, worker: ShardWorker, shard: Shard) -> None:
        failed = await worker.run(shard)
        _, num_restored = self._open.pop(shard, (0, 0))
        numbers = {"num_failed": len(failed), "num_skipped": num_restored, "window": worker.window}
        self._tell(self._progress.plus(shard.num_rows, shard.share, **numbers))

    def _tell(self, progress: Progress) -> None:
        num_open = sum(num_rows - num_restored for num_rows, num_restored in self._open.values())
        share_open = sum(shard.share * num_rows / shard.num_rows for shard, (num_rows, _) in self._open.items())
        self._progress = progress = progress._replace(num_open=num_open, share_open=share_open)
        if self._on_progress is not None:
            self._on_progress(progress)


def first_error(group: BaseExceptionGroup[Any]) -> Exception:
    """The first error of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else InternalError(str(error))
