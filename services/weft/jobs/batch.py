"""A batch job: every row of a data set through a graph or model, into files, exactly once: ``run_batch``."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from weft.base.errors import InternalError, WeftError
from weft.jobs.atomic_files import held
from weft.jobs.dataset import Dataset, Shard
from weft.jobs.job import MAX_OPEN_SHARDS, BatchOptions, Progress, ShardWorker, plan_job
from weft.jobs.output import OutputFolder, begin
from weft.v2.client.v2_client import V2Client

__all__ = ["BatchOptions", "Progress", "run_batch"]


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
    target, plan = await plan_job(client, options)
    with held(options.output):
        dataset = await asyncio.to_thread(Dataset, options.input, options.format)
        begin(options.output, plan.manifest(options, dataset), resume=options.resume)
        folder = OutputFolder(options.output, options.output_format, plan.layout.schema)
        folder.remove_unfinished()
        num_failed = folder.num_failed()
        worker = ShardWorker(options, target, plan, folder, num_failed)
        shards = dataset.shards(options.rows_per_shard, plan.layout.columns, folder.is_done)
        return await _Job(worker, folder, shards, num_failed, on_progress).run()


class _Job:
    def __init__(
        self,
        worker: ShardWorker,
        folder: OutputFolder,
        shards: Iterator[Shard],
        num_failed: int,
        on_progress: Callable[[Progress], None] | None,
    ) -> None:
        self._worker = worker
        self._folder = folder
        self._shards = shards
        self._on_progress = on_progress
        self._progress = Progress(0, num_failed, 0, worker.window)

    async def run(self) -> Progress:
        open_shards = asyncio.Semaphore(MAX_OPEN_SHARDS)
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    await open_shards.acquire()
                    shard = await asyncio.to_thread(next, self._shards, None)
                    if shard is None:
                        break
                    if self._folder.is_done(shard.index):
                        self._tell(self._progress.plus(shard.num_rows, shard.share, is_skipped=True))
                        open_shards.release()
                        continue
                    task = group.create_task(self._run(shard))
                    task.add_done_callback(lambda _: open_shards.release())
        except* (WeftError, OSError) as group_error:
            raise first_error(group_error) from None
        return self._progress

    async def _run(self, shard: Shard) -> None:
        failed = await self._worker.run(shard)
        self._tell(self._progress.plus(shard.num_rows, shard.share, num_failed=len(failed), window=self._worker.window))

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        if self._on_progress is not None:
            self._on_progress(progress)


def first_error(group: BaseExceptionGroup[Any]) -> Exception:
    """The first error of nested groups."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else InternalError(str(error))
