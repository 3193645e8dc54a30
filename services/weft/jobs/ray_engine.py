"""Runs a batch job on the machines of a Ray cluster: ``run_batch_on_ray``.

Ray Data places, starts and replaces the workers, and gives each shard to one of them; a worker reads its shard from the
data set, sends the requests and writes the shard's files. The driver locks the folder and counts.
"""

import asyncio
import logging
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from weft.base.errors import InternalError, RemoteError, UnavailableError, WeftError
from weft.base.observing.logs import get_logger
from weft.jobs.atomic_files import held
from weft.jobs.batch import (
    MAX_OPEN_SHARDS,
    BatchOptions,
    JobPlan,
    Progress,
    ShardWorker,
    begin_job,
    check_failures,
    open_dataset,
    plan_job,
)
from weft.jobs.dataset import Dataset, ShardSpan
from weft.jobs.output import MANIFEST, FailedRow, OutputFolder
from weft.v2.client.v2_client import V2Client

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reads it as it is imported

import ray
import ray.data
import ray.exceptions

#: Opens a client of a router; Ray sends it to the workers.
OpenClient = Callable[[], AbstractAsyncContextManager[V2Client]]

_log = get_logger("weft.jobs")
#: How often a shard is begun; each time but the last the worker died.
_MAX_TRIES = 5
_LOCAL = "local"
_CONNECT_TIMEOUT_S = 10.0


class _SpanTask(NamedTuple):
    span: ShardSpan
    done: frozenset[int]


@dataclass(frozen=True)
class _SharedJob:
    options: BatchOptions
    manifest: bytes
    plan: JobPlan
    dataset: Dataset
    num_failed: int
    open_client: OpenClient


class _SpanReport(NamedTuple):
    """A worker's result for a span, or why the job cannot continue: a status and a message."""

    done: Progress = Progress()
    first_failed: FailedRow | None = None
    error: tuple[str, str] | None = None
    damage: tuple[str, str] | None = None  # a file that is passed over, and why


def run_batch_on_ray(
    open_client: OpenClient,
    options: BatchOptions,
    on_progress: Callable[[Progress], None] | None = None,
    *,
    address: str = "",
    num_workers: int = 0,
) -> Progress:
    """Run a job on a Ray cluster until every row is written; the files equal those of ``run_batch``, byte for byte.

    All machines must see the data set and the output under the same paths. Workers that die are replaced; a driver that
    dies ends them, and the job can be resumed by either engine.

    Args:
        open_client: Creates a client of a router, here and in each worker.
        options: Options of the job; the workers share ``max_inflight``.
        on_progress: Called after each shard.
        address: Of a cluster; "": that of RAY_ADDRESS, or else a local one for this job.
        num_workers: Processes that send requests; 0: one for each node.

    Raises:
        WeftError: The job cannot begin, or go on.
        OSError: A file cannot be read or written.
    """
    options = replace(options, output=options.output.resolve())

    async def make_plan() -> JobPlan:
        async with open_client() as client:
            return (await plan_job(client, options))[1]

    plan = asyncio.run(make_plan())
    with held(options.output):
        dataset, plan = open_dataset(options, plan)
        folder = OutputFolder(options.output, options.output_format, plan.layout.schema)
        begin_job(options, plan, dataset, folder)
        progress = Progress(num_failed=folder.num_failed())
        tasks = []
        for span in dataset.spans(plan.rows_per_shard):
            done = frozenset(place for place in range(len(span.num_rows)) if folder.is_done(span.first_index + place))
            if len(done) < len(span.num_rows):
                tasks.append(_SpanTask(span, done))
            num_rows = sum(span.num_rows[place] for place in done)
            if num_rows:
                share = span.share * num_rows / sum(span.num_rows)
                progress = progress.plus(num_rows, share, num_skipped=num_rows)
        progress = progress._replace(num_bad_files=len(dataset.bad_files))
        if not tasks:
            return progress
        options = replace(
            options, resume=True, graph=f"{plan.identity.signature.name}/{plan.identity.signature.version}"
        )
        manifest = (options.output / MANIFEST).read_bytes()
        job = _SharedJob(options, manifest, plan, dataset, progress.num_failed, open_client)
        # What Ray prints, such as that a worker died, is no part of the command's answer.
        with redirect_stdout(sys.stderr), _cluster(address):
            for report in _reports(job, tasks, num_workers):
                of_span = report.done
                if report.error:
                    raise RemoteError(*report.error)
                if report.damage:
                    path, message = report.damage
                    dataset.bad_files[path] = message
                    _log.warning("rows of '%s' are passed over: %s", path, message)
                if report.first_failed:
                    check_failures(options, progress.num_failed + of_span.num_failed - 1, [report.first_failed])
                if not of_span.num_rows:
                    continue
                progress = progress.plus(
                    of_span.num_rows, of_span.share, num_failed=of_span.num_failed, window=of_span.window
                )
                if on_progress is not None:
                    on_progress(progress)
        folder.remove_unfinished()
        return progress._replace(num_bad_files=len(dataset.bad_files))


@contextmanager
def _cluster(address: str) -> Iterator[None]:
    """A connection to a cluster, or a cluster for the length of the block; this process's own if it has one."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS") or _LOCAL
    own = {"include_dashboard": False} if where == _LOCAL else {}
    _check_address(where)
    try:
        ray.init(where, log_to_driver=False, logging_level=logging.ERROR, **own)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UnavailableError(f"no Ray cluster at '{where}': {error}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Reject HOST:PORT where nothing listens; Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        return  # "auto", "local" and ray://, which Ray looks up by itself
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        raise UnavailableError(
            f"no Ray cluster at '{address}': {error}; give the HOST:PORT that `ray start --head` printed"
        ) from None


def _reports(job: _SharedJob, tasks: Sequence[_SpanTask], num_workers: int) -> Iterator[_SpanReport]:
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise UnavailableError("no node of the Ray cluster has a CPU for a worker; add one")
    num_workers = min(num_workers or len(nodes), job.options.max_inflight, len(tasks))
    options = replace(job.options, max_inflight=job.options.max_inflight // num_workers)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    for handler in logging.getLogger("ray.data").handlers:
        if isinstance(handler, logging.StreamHandler):  # its log file stays as it is
            handler.setLevel(logging.CRITICAL)
    shards = ray.data.from_items([{"task": number} for number in range(len(tasks))], override_num_blocks=len(tasks))
    reports = shards.map_batches(
        _RayWorker,
        fn_constructor_args=(replace(job, options=options), list(tasks)),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(
            size=num_workers,
            max_concurrent_calls_per_actor=MAX_OPEN_SHARDS,
            enable_true_multi_threading=True,
        ),
        num_cpus=1,
    )
    try:
        for row in reports.iter_rows():
            yield pickle.loads(row["report"])  # noqa: S301  # of our own worker
    except ray.exceptions.RayError as error:
        raise UnavailableError(f"Ray cannot go on: {str(error).strip().splitlines()[-1]}; --resume goes on") from error


class _RayWorker:
    """A process on a node of the cluster; Ray calls it from several threads."""

    def __init__(self, job: _SharedJob, tasks: list[_SpanTask]) -> None:
        self._job = job
        self._tasks = tasks
        self._name = f"{socket.gethostname()}-{os.getpid()}"
        self._loop = asyncio.new_event_loop()
        self._starting = asyncio.Lock()
        self._opened: AbstractAsyncContextManager[V2Client] | None = None
        self._worker: ShardWorker | None = None
        options = job.options
        self._folder = OutputFolder(options.output, options.output_format, job.plan.layout.schema, self._name)
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, list[bytes]]:
        """Do one task; returns a column with a report."""
        task = self._tasks[int(batch["task"][0])]
        try:
            report = asyncio.run_coroutine_threadsafe(self._do(task), self._loop).result()
        except (WeftError, OSError) as error:
            code, message = (error.code, error.message) if isinstance(error, WeftError) else (InternalError.code, error)
            report = _SpanReport(error=(code, f"{message} (worker {self._name})"))
        return {"report": [pickle.dumps(report)]}

    async def _do(self, task: _SpanTask) -> _SpanReport:
        job, report = self._job, _SpanReport()
        async with self._starting:
            if self._worker is None:
                self._worker = await self._start()
        shards = job.dataset.read(task.span, job.plan.layout.columns)
        for place in range(len(task.span.num_rows)):
            shard = await asyncio.to_thread(next, shards, None)
            if shard is None:
                path = job.dataset.files[task.span.file].path
                return report._replace(damage=(path, job.dataset.bad_files[path]))
            if place in task.done:
                continue
            self._check_folder()
            if self._folder.is_done(shard.index):  # by a worker that died before it could say so
                failed = self._folder.failed_in(shard.index)
            else:
                # Ray would give a shard that ends its workers to others for ever.
                if self._folder.begin(shard.index) >= _MAX_TRIES:
                    raise UnavailableError(
                        f"{_MAX_TRIES} workers died at the {shard.num_rows} rows from {shard.first_row} of "
                        f"'{shard.file}'; Ray's logs say why, want of memory is usual: begin again with smaller "
                        "--rows-per-shard"
                    )
                failed = await self._worker.run(shard)
            numbers = {"num_failed": len(failed), "window": self._worker.window}
            done = report.done.plus(shard.num_rows, shard.share, **numbers)
            report = report._replace(done=done, first_failed=report.first_failed or next(iter(failed), None))
        return report

    async def _start(self) -> ShardWorker:
        job = self._job
        self._check_folder()
        self._opened = job.open_client()
        client = await self._opened.__aenter__()  # until Ray ends the process
        target, _ = await plan_job(client, job.options)
        return ShardWorker(job.options, target, job.plan, self._folder, job.num_failed)

    def _check_folder(self) -> None:
        """Check that the folder is the job's: shared by the machines, and not reused by another job."""
        path = self._job.options.output / MANIFEST
        try:
            is_same = path.read_bytes() == self._job.manifest
        except FileNotFoundError:
            is_same = False
        if not is_same:
            raise UnavailableError(
                f"'{path}' is not that of this job; --output must be a folder that every machine of the cluster shares"
            )
