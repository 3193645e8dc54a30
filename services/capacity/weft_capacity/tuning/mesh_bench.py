"""Runs configurations as real meshes from staged repositories, and measures them under load."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

from weft_capacity.tuning.contest import TrialError
from weft_capacity.tuning.graph_models import TunedGraph
from weft_capacity.tuning.measurement import PERCENTILES, Measurement
from weft_capacity.tuning.requests import RequestSet, arrivals
from weft_capacity.tuning.space import Configuration, Cost, SearchSpace
from weft_capacity.tuning.staging import stage
from weft_capacity.tuning.traffic import Traffic, caller, closed_loop, open_loop
from weft_common.client.channels import open_channel
from weft_common.client.v2_client import V2Client
from weft_common.errors import WeftError
from weft_common.processes.memory import available_bytes
from weft_common.processes.process import Endpoint
from weft_common.signature import ModelSignature
from weft_jobs.target import JobTarget
from weft_mesh.preflight import MeshError
from weft_mesh.running import running_mesh

T = TypeVar("T")

_START_TIMEOUT_S = 120
_CALL_TIMEOUT_S = 30.0
#: Answers that a run waits for, so that a 99th percentile is more than the slowest of a few.
_MIN_ANSWERS = 100
_WARM_UP_CONCURRENCY = 8
#: With less memory left on the machine a run ends before the kernel chooses what does.
_MIN_MEMORY_BYTES = 128 << 20
_MEMORY_PERIOD_S = 0.2
_MAX_REASON = 400


class MeshBench:
    """Starts meshes.

    Args:
        graph: What is served.
        space: Turns configurations into files and arguments.
        folder: Of staged repositories and of the meshes' logs.
        make_requests: Makes the requests, once, of the signature that the first mesh tells.
        rate_per_s: Of an open loop; 0: as recorded.
        warm_up_s: Load that is not counted, before each mesh is measured.
        seed: Of Poisson arrivals.
        mesh_arguments: More arguments of ``weft up``.
    """

    def __init__(
        self,
        graph: TunedGraph,
        space: SearchSpace,
        folder: Path,
        *,
        make_requests: Callable[[ModelSignature], RequestSet],
        rate_per_s: float = 0.0,
        warm_up_s: float = 1.0,
        seed: int = 0,
        mesh_arguments: tuple[str, ...] = (),
    ) -> None:
        self._graph = graph
        self.space = space
        self._folder = folder
        self._make_requests = make_requests
        self._mesh_arguments = mesh_arguments
        self._num_started = 0
        self.requests: RequestSet | None = None
        self.rate_per_s = rate_per_s
        self.warm_up_s = warm_up_s
        self.seed = seed

    def open(self, configuration: Configuration) -> "MeshUnderLoad":
        """A mesh that serves and is warm.

        Raises:
            TrialError: It does not start, or does not answer.
            WeftError: No requests can be made for it.
            OSError: The repository cannot be staged.
        """
        self._num_started += 1
        name = f"mesh-{self._num_started % 2}"  # at most two run at once: the incumbent's, and that of a trial
        with contextlib.ExitStack() as stack:
            try:
                texts = self.space.texts(configuration)
                repository = stage(self._graph, texts, self._folder / name)
                log_path = self._folder / f"{name}.log"
                log = stack.enter_context(log_path.open("w"))
                arguments = [
                    "--no-restart", "--exit-on-error", "--start-timeout-s", str(_START_TIMEOUT_S),
                    *self.space.mesh_arguments(configuration), *self._mesh_arguments,
                ]  # fmt: skip
                endpoints = stack.enter_context(running_mesh(repository, arguments, log=log))
            except MeshError:
                raise TrialError(f"the mesh does not start: {_reason(log_path)}") from None
            if self.requests is None:
                signature = _run(_signature(endpoints["router"].grpc, self._graph.name))
                self.requests = self._make_requests(signature)
            mesh = MeshUnderLoad(self, self.requests, endpoints, stack.pop_all())
        try:
            mesh.warm_up()
        except BaseException:
            mesh.close()
            raise
        return mesh


class MeshUnderLoad:
    """A mesh that runs, until it is closed."""

    def __init__(
        self, bench: MeshBench, requests: RequestSet, endpoints: Mapping[str, Endpoint], stack: contextlib.ExitStack
    ) -> None:
        self._bench = bench
        self._requests = requests
        self._endpoints = endpoints
        self._stack = stack
        self._address = endpoints["router"].grpc
        router = endpoints["router"].pid
        self._supervisor = int(Path(f"/proc/{router}/stat").read_text().rpartition(")")[2].split()[1])
        self._num_runs = 0

    def warm_up(self) -> None:
        """Load that is not counted."""
        self._load(_WARM_UP_CONCURRENCY, self._bench.warm_up_s, min_answers=_MIN_ANSWERS)

    def measure(self, level: int, duration_s: float) -> Measurement:
        """One run.

        Args:
            level: Requests in work at once; 0: an open loop, at the rate of the bench or as recorded.
            duration_s: Of the arrivals.

        Raises:
            TrialError: The machine runs out of memory, or the mesh has ended.
        """
        before_s = self._cpu_s()
        traffic = self._load(level, duration_s, min_answers=_MIN_ANSWERS)
        cpu_s = self._cpu_s() - before_s
        num_answers = len(traffic.latencies_s)
        return Measurement(
            level=level,
            throughput_per_s=num_answers / traffic.duration_s if traffic.duration_s > 0 else 0.0,
            cpu_s_per_1000=cpu_s / num_answers * 1000 if num_answers else float("nan"),
            latency_ms={percent: traffic.percentile_ms(percent) for percent in PERCENTILES},
            num_answers=num_answers,
            errors=dict(traffic.errors),
            offered_per_s=0.0 if level else traffic.num_planned / duration_s,
            first_error=traffic.first_error[:_MAX_REASON],
        )

    def costs(self) -> dict[str, Cost]:
        """What each model has taken of the work, by name, as the services count it. Raises TrialError."""
        try:
            return _run(self._costs())
        except WeftError as error:
            raise TrialError(f"the statistics are not answered: {error.message}") from None

    def close(self) -> None:
        """End the mesh."""
        self._stack.close()

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

    def _load(self, level: int, duration_s: float, *, min_answers: int) -> Traffic:
        return _run(_guarded(self._traffic(level, duration_s, min_answers)))

    async def _traffic(self, level: int, duration_s: float, min_answers: int) -> Traffic:
        async with open_channel(self._address) as channel:
            call = caller(channel)
            with contextlib.suppress(Exception):  # connect; what is wrong the run will tell
                await call(self._requests.payloads[0])
            if level:
                start = self._num_runs * 97 % len(self._requests.payloads)  # runs of few requests see all of them
                payloads = self._requests.payloads[start:] + self._requests.payloads[:start]
                self._num_runs += 1
                return await closed_loop(
                    call, payloads, concurrency=level, duration_s=duration_s, min_answers=min_answers
                )
            return await open_loop(call, arrivals(self._requests, self._bench.rate_per_s, duration_s, self._bench.seed))

    def _cpu_s(self) -> float:
        """CPU time that the processes of the mesh have used, ``weft up`` too, seconds."""
        try:
            return sum(_process_cpu_s(pid) for pid in _process_tree(self._supervisor))
        except OSError:
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


async def _guarded(load: Awaitable[Traffic]) -> Traffic:
    """The load, unless memory runs out first."""
    task = asyncio.ensure_future(load)
    while True:
        done, _ = await asyncio.wait((task,), timeout=_MEMORY_PERIOD_S)
        if done:
            return task.result()
        left_bytes = available_bytes()
        if left_bytes is not None and left_bytes < _MIN_MEMORY_BYTES:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise TrialError(f"memory runs out: the machine has {left_bytes >> 20} MiB left")


def _run(work: Awaitable[T]) -> T:
    async def main() -> T:
        return await work

    return asyncio.run(main())


def _reason(log: Path) -> str:
    """The last error that the mesh logged, or its last line."""
    lines = log.read_text(errors="replace").splitlines()
    found = ""
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            found = line.strip() or found
            continue
        if isinstance(record, dict) and record.get("level") in ("error", "critical"):
            found = str(record.get("message", ""))
    return (found or (lines[-1] if lines else "it logged nothing"))[:_MAX_REASON]
