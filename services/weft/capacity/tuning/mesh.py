"""Runs configurations as real meshes over staged repositories, and measures them under load."""

import asyncio
import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.base.errors import WeftError
from weft.base.processes.malloc import available_bytes
from weft.base.signature import ModelSignature
from weft.capacity.tuning.graph_models import TunedGraph, restage, stage_graph
from weft.capacity.tuning.load import Bounds, Load, RequestSet, arrivals, caller, closed_loop, planned_loop
from weft.capacity.tuning.measurement import PERCENTILES, Measurement, TrialError
from weft.capacity.tuning.space import Configuration, Cost, SearchSpace
from weft.jobs.target import JobTarget
from weft.mesh.preflight import MeshError
from weft.mesh.running import last_error, running_mesh
from weft.v2.client.channels import open_channel
from weft.v2.client.v2_client import V2Client

#: Most of an error's text that a trial keeps, in characters.
_MAX_REASON = 400
_START_TIMEOUT_S = 120
_CALL_TIMEOUT_S = 30.0
#: Answers that a run waits for, so that a 99th percentile is more than the slowest of a few.
_MIN_ANSWERS = 100
#: Failed requests that end a run.
_MAX_ERRORS = 100
_WARM_UP_CONCURRENCY = 8
#: With less memory left on the machine a run ends before the kernel chooses what does.
_MIN_MEMORY_BYTES = 128 << 20
_MEMORY_PERIOD_S = 0.2
#: Meshes that are kept beside the incumbent's and that of a trial.
_MAX_IDLE = 2


@dataclass
class MeshBench:
    """Starts meshes, and reuses idle ones for configurations that differ only in models.

    Attributes:
        make_requests: Makes the requests, once, from the signature that the first mesh reports.
        rate_per_s: Of an open loop; 0: as recorded.
        warm_up_s: Uncounted load before each configuration is measured.
    """

    graph: TunedGraph
    space: SearchSpace
    folder: Path
    make_requests: Callable[[ModelSignature], RequestSet]
    rate_per_s: float = 0.0
    warm_up_s: float = 1.0
    seed: int = 0
    requests: RequestSet | None = None
    _num_started: int = 0
    _idle: "list[TrialMesh]" = field(default_factory=list)

    def open(self, configuration: Configuration, *, fresh: bool = False) -> "TrialMesh":
        """Start or reuse a mesh, and warm it up; ``fresh``: in new processes.

        Raises:
            TrialError: It does not start, or does not answer.
            WeftError: No requests can be made for it.
            OSError: The repository cannot be staged.
        """
        texts = self.space.texts(configuration)
        key = (tuple(self.space.mesh_arguments(configuration)), self.space.process_wide(configuration))
        mesh = None if fresh else next((mesh for mesh in self._idle if mesh.key == key), None)
        if mesh is None:
            self._num_started += 1
            mesh = TrialMesh(self, self.graph, self.folder / f"mesh-{self._num_started}", texts, key)
        else:
            self._idle.remove(mesh)
        try:
            mesh.load_configurations(texts)
            if self.requests is None:
                self.requests = self.make_requests(asyncio.run(_signature(mesh.address, self.graph.name)))
            mesh.run_load(_WARM_UP_CONCURRENCY, self.warm_up_s)
        except BaseException:
            mesh.stop()
            raise
        return mesh

    def keep(self, mesh: "TrialMesh") -> None:
        """Keep a mesh for reuse, in place of the oldest one."""
        if mesh.is_sound:
            self._idle.append(mesh)
        else:
            mesh.stop()
        while len(self._idle) > _MAX_IDLE:
            self._idle.pop(0).stop()

    def close(self) -> None:
        """Stop the kept meshes."""
        while self._idle:
            self._idle.pop().stop()


class TrialMesh:
    """A mesh over a staged repository, under load; its models can be reloaded with other configurations.

    Args:
        bench: Has the requests; gets the mesh back when it is closed.
        place: Folder of the repository, which is created; the log beside it has its name.
        texts: The ``config.pbtxt`` of each model that differs, by model.
        key: Arguments of ``weft up``, and settings that its processes keep.

    Attributes:
        is_sound: Nothing has failed so far.

    Raises:
        TrialError: It does not start.
        OSError: The repository cannot be staged.
    """

    def __init__(
        self,
        bench: MeshBench,
        graph: TunedGraph,
        place: Path,
        texts: Mapping[str, str],
        key: tuple[tuple[str, ...], object],
    ) -> None:
        self._bench = bench
        self._graph = graph
        self._texts = dict(texts)
        self._repository = stage_graph(graph, texts, place)
        self._log = place.with_name(f"{place.name}.log")
        self._num_runs = 0
        self.key = key
        self.is_sound = True
        started = [*key[0], "--no-restart", "--exit-on-error", "--start-timeout-s", str(_START_TIMEOUT_S)]
        started += ["--model-control-mode", "explicit", "--load-model", "*"]
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            try:
                log = stack.enter_context(self._log.open("w"))
                self._endpoints = stack.enter_context(running_mesh(self._repository, started, log=log))
            except MeshError:
                raise TrialError(f"the mesh does not start: {last_error(self._log)}") from None
            self._stack = stack.pop_all()
        self.address = self._endpoints["router"].grpc
        router = self._endpoints["router"].pid
        self._supervisor = int(Path(f"/proc/{router}/stat").read_text().rpartition(")")[2].split()[1])

    def load_configurations(self, texts: Mapping[str, str]) -> None:
        """Switch configurations: reload the models whose own differs. Raises TrialError: one cannot be loaded."""
        changed = [name for name in {**self._texts, **texts} if self._texts.get(name) != texts.get(name)]
        self._texts = dict(texts)
        try:
            for name in changed:
                restage(self._graph, name, texts.get(name), self._repository)

            async def load() -> None:
                for name in changed:
                    async with V2Client(self._endpoints[self._graph.models[name].service].grpc) as client:
                        await client.load(name, {}, timeout_s=_START_TIMEOUT_S)

            asyncio.run(load())
        except WeftError as error:
            self.is_sound = False
            raise TrialError(f"a model does not load: {error.message[:_MAX_REASON]}") from None

    def measure(self, level: int, duration_s: float) -> Measurement:
        """Measure a run with ``level`` requests in flight; 0: an open loop, at the bench's rate or as recorded.

        Raises:
            TrialError: The machine runs out of memory, or the mesh has ended.
        """
        before_s = self._cpu_s()
        load = self.run_load(level, duration_s)
        cpu_s = self._cpu_s() - before_s
        num_answers = len(load.latencies_s)
        self.is_sound = self.is_sound and not load.errors
        return Measurement(
            level=level,
            throughput_per_s=load.rate_per_s,
            cpu_s_per_1000=cpu_s / num_answers * 1000 if num_answers else float("nan"),
            latency_ms={percent: load.percentile_ms(percent) for percent in PERCENTILES},
            num_answers=num_answers,
            errors=dict(load.errors),
            offered_per_s=0.0 if level else load.num_planned / duration_s,
            first_error=load.first_error[:_MAX_REASON],
        )

    def costs(self) -> dict[str, Cost]:
        """Each model's share of the work, by name, as the services count it. Raises TrialError."""
        try:
            return asyncio.run(self._costs())
        except WeftError as error:
            raise TrialError(f"the statistics are not answered: {error.message}") from None

    def close(self) -> None:
        """Return it to the bench."""
        self._bench.keep(self)

    def stop(self) -> None:
        """Stop it; keep the log if something failed."""
        self._stack.close()
        if self.is_sound:
            self._log.unlink(missing_ok=True)

    def run_load(self, level: int, duration_s: float) -> Load:
        """Load as of ``measure``. Raises TrialError: the machine runs out of memory."""
        try:
            return asyncio.run(_guarded(self._load(level, duration_s)))
        except BaseException:
            self.is_sound = False
            raise

    async def _load(self, level: int, duration_s: float) -> Load:
        bench, requests = self._bench, self._bench.requests
        assert requests is not None  # noqa: S101  # made before the first load
        async with open_channel(self.address) as channel:
            call = caller(channel)
            with contextlib.suppress(Exception):  # connect; what is wrong the run will tell
                await call(requests.payloads[0])
            if not level:
                return await planned_loop(call, arrivals(requests, bench.rate_per_s, duration_s, bench.seed))
            start = self._num_runs * 97 % len(requests.payloads)  # runs of few requests see all of them
            payloads = requests.payloads[start:] + requests.payloads[:start]
            self._num_runs += 1
            bounds = Bounds(sys.maxsize, duration_s)
            return await closed_loop(
                call, payloads, bounds, concurrency=level, min_answers=_MIN_ANSWERS, max_errors=_MAX_ERRORS
            )

    async def _costs(self) -> dict[str, Cost]:
        computed_ns: dict[str, float] = {}
        execution_ns: dict[str, float] = {}
        for address in {endpoint.grpc for endpoint in self._endpoints.values() if endpoint.grpc}:
            async with V2Client(address) as client:
                for model in await client.statistics("", "", timeout_s=_CALL_TIMEOUT_S):
                    compute = model.inference_stats.compute_infer
                    if compute.count and model.execution_count:
                        execution_ns[model.name] = compute.ns / compute.count
                        computed_ns[model.name] = execution_ns[model.name] * model.execution_count
        models = set(self._bench.space.models) & set(computed_ns)
        total_ns = sum(computed_ns[name] for name in models)
        return {name: Cost(execution_ns[name] / 1e3, computed_ns[name] / max(total_ns, 1.0)) for name in models}

    def _cpu_s(self) -> float:
        """CPU time that its processes have used, ``weft up`` too, seconds."""
        try:
            return sum(_process_cpu_s(pid) for pid in _process_tree(self._supervisor))
        except OSError:
            self.is_sound = False
            raise TrialError("the mesh has ended") from None


def _process_cpu_s(pid: int) -> float:
    """CPU time of a process, in nanoseconds' resolution.

    Source:
        clock_getcpuclockid(3): the clock of a process is made of its id as the C library makes it.
    """
    return time.clock_gettime((~pid << 3) | 2)


def _process_tree(pid: int) -> list[int]:
    found = [pid]
    for parent in found:
        for thread in Path(f"/proc/{parent}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):  # the thread has ended
                found += [int(child) for child in (thread / "children").read_text().split()]
    return found


async def _signature(address: str, name: str) -> ModelSignature:
    model, _, version = name.partition("/")
    async with V2Client(address) as client:
        target = JobTarget(client, model, version, clock_s=time.monotonic)
        return (await target.identify()).signature


async def _guarded(load: Coroutine[Any, Any, Load]) -> Load:
    """Run the load; stop it if memory runs out."""
    task = asyncio.create_task(load)
    while True:
        done, _ = await asyncio.wait((task,), timeout=_MEMORY_PERIOD_S)
        if done:
            return task.result()
        left_bytes = available_bytes()
        if left_bytes is not None and left_bytes < _MIN_MEMORY_BYTES:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise TrialError(f"memory runs out: the machine has {left_bytes >> 20} MiB left")
