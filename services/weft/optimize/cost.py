"""Measures a version's CPU time, latency and throughput, for the model alone, in turn with the original.

Each runs in a process of its own, whose CPU time is measured; a crash affects only that process.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from weft.base.core import CallContext, InferCall
from weft.base.errors import UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor, encode
from weft.optimize.methods.method import Inputs
from weft.serving.core import ServingCore
from weft.tools.offline import BACKENDS

#: Time that the original should need for the requests of one round, in seconds of CPU.
_ROUND_CPU_S = 0.25
_MIN_REQUESTS, _MAX_REQUESTS = 2, 400
#: Requests in flight where throughput is measured.
NUM_INFLIGHT = 4
OBJECTIVES = ("latency", "throughput")
_GRACE_S = 10.0
_JOIN_S = 20.0
#: Loading a model, compiling it for instance, may take long.
_START_LIMIT_S = 600.0
_CALL_LIMIT_S = 600.0


class Sample(NamedTuple):
    """Measurements of some requests.

    Attributes:
        elapsed_s: All together.
        latencies_s: Of each.
        cpu_s: CPU time of the process, of all its threads.
        num_rows: In all requests together.
    """

    elapsed_s: float
    latencies_s: Sequence[float]
    cpu_s: float
    num_rows: int


class VersionProcess:
    """Serves one model without a network: requests pass its queue, batcher and backend, as in a service.

    Args:
        repository: Staged, with one version of the model.
        service: Folder of models in it; "" if they lie side by side.
        has_batch: Whether requests have a batch dimension.

    Raises:
        UnavailableError: The version cannot be loaded; the message says why.
    """

    def __init__(self, repository: Path, service: str, model: str, *, has_batch: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, str(repository / service), service or "model", model, has_batch)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        try:
            self.signature: ModelSignature = self._answer(_START_LIMIT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, name: str, requests: Sequence[Inputs]) -> None:
        """Send a set of requests to the process, which answers each once to warm up.

        Raises:
            UnavailableError: It fails at one of them, or dies.
        """
        self._ask((name, [{key: encode(array) for key, array in request.items()} for request in requests]))

    def measure(self, name: str, num_requests: int, num_inflight: int = 1) -> Sample:
        """Answer requests of a set in turn, ``num_inflight`` at once, and measure them. Raises as ``send``."""
        return Sample(*self._ask((name, (num_requests, num_inflight))))

    def close(self) -> None:
        """End the process."""
        self._pipe.close()  # which it takes for the end
        self._process.join(_JOIN_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, message: Any) -> Any:
        with contextlib.suppress(OSError):  # it has ended, as the answer says
            self._pipe.send(message)
        return self._answer(_CALL_LIMIT_S)

    def _answer(self, limit_s: float) -> Any:
        try:
            if not self._pipe.poll(limit_s):
                raise UnavailableError(f"it does not answer within {limit_s:.0f} s")
            fault, answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_JOIN_S)
            status = self._process.exitcode
            how = f"signal {-status}" if status is not None and status < 0 else f"exit status {status}"
            raise UnavailableError(f"its process died with {how}") from None
        if fault:
            raise UnavailableError(fault)
        return answer


def _serve(pipe: Connection, folder: str, service: str, model: str, has_batch: bool) -> None:
    """Run the process."""
    logging.disable(logging.CRITICAL)  # faults go through the pipe
    os.dup2(2, 1)  # standard output belongs to the command
    sys.stdout = sys.stderr
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):  # the command has ended
        asyncio.run(_run(pipe, Path(folder), service, model, has_batch))


async def _run(pipe: Connection, folder: Path, service: str, model: str, has_batch: bool) -> None:
    core = ServingCore(folder, BACKENDS[service], model_control="explicit", load_models=[model])
    await core.start()
    if core.is_ready():
        pipe.send(("", core.signature(model, "")))
        await _answer_messages(pipe, core, model, has_batch)
    else:
        reasons = [entry.reason for entry in core.index(ready_only=False) if entry.name == model]
        pipe.send(("; ".join(reasons) or "it does not become ready", None))
    await core.close(grace_s=_GRACE_S)


async def _answer_messages(pipe: Connection, core: ServingCore, model: str, has_batch: bool) -> None:
    sets: dict[str, Sequence[Mapping[str, WireTensor]]] = {}

    async def measure(
        requests: Sequence[Mapping[str, WireTensor]], num_requests: int, num_inflight: int
    ) -> tuple[Any, ...]:
        latencies_s = []
        num_rows = 0
        indices = iter(range(num_requests))

        async def send() -> None:
            nonlocal num_rows
            for index in indices:
                inputs = dict(requests[index % len(requests)])
                rows = next(iter(inputs.values())).shape[0] if has_batch else 1
                call = InferCall(model, inputs=inputs, num_rows=rows)
                start_s = time.perf_counter()
                await core.infer(call, CallContext())
                latencies_s.append(time.perf_counter() - start_s)
                num_rows += rows

        begin_s, cpu_s = time.perf_counter(), _cpu_s()
        await asyncio.gather(*(send() for _ in range(num_inflight)))
        return time.perf_counter() - begin_s, latencies_s, _cpu_s() - cpu_s, num_rows

    while True:
        try:
            name, what = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        try:
            is_question = isinstance(what, tuple)
            if not is_question:
                sets[name] = what
            answer = await measure(sets[name], *(what if is_question else (len(what), 1)))
        except Exception as error:
            pipe.send((f"it fails at a request: {error}", None))
        else:
            pipe.send(("", answer))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class VersionCost(NamedTuple):
    """Cost of a version at one number of rows a request.

    Attributes:
        cpu_s_per_1000: CPU-seconds for 1000 rows; median of the rounds.
        p50_ms, p99_ms: Latency of requests one at a time.
        rows_per_s: With ``NUM_INFLIGHT`` requests in flight; median of the rounds.
        ratio: CPU time as a share of the original's; median of the rounds' ratios. 1 for the original.
        time_ratio: Likewise, the median time of requests one at a time.
        busy_time_ratio: Likewise, the time for a row with ``NUM_INFLIGHT`` requests in flight.
    """

    cpu_s_per_1000: float
    p50_ms: float
    p99_ms: float
    rows_per_s: float
    ratio: float = 1.0
    time_ratio: float = 1.0
    busy_time_ratio: float = 1.0


class CostMeter:
    """Compares candidates with the original, which stays loaded meanwhile.

    Args:
        requests: Requests by rows of each, for example of 1 row and of 32.
        num_rounds: How often each set is answered by both, in turn.
    """

    def __init__(self, original: VersionProcess, requests: Mapping[int, Sequence[Inputs]], num_rounds: int) -> None:
        self._original = original
        self._requests = requests
        self._num_rounds = num_rounds
        self._num_requests: dict[int, int] = {}
        for rows, some in requests.items():
            original.send(str(rows), some)
            trial = original.measure(str(rows), min(len(some), _MIN_REQUESTS))
            wanted = _ROUND_CPU_S * len(trial.latencies_s) / max(trial.cpu_s, 1e-6)
            self._num_requests[rows] = int(min(max(wanted, _MIN_REQUESTS), _MAX_REQUESTS))

    def measure(self, candidate: VersionProcess) -> tuple[dict[int, VersionCost], dict[int, VersionCost]]:
        """Cost of the original and of a candidate by rows of a request, measured in turn.

        Raises:
            UnavailableError: A request fails, or a process dies.
        """
        for rows, some in self._requests.items():
            candidate.send(str(rows), some)
        costs: tuple[dict[int, VersionCost], dict[int, VersionCost]] = ({}, {})
        for rows in self._requests:
            own: list[_Round] = []
            other: list[_Round] = []
            for index in range(self._num_rounds):
                turns = [(self._original, own), (candidate, other)]
                for process, rounds in turns if index % 2 else reversed(turns):
                    rounds.append(self._round(process, rows))
            costs[0][rows] = _cost(own)
            costs[1][rows] = _cost(other)._replace(
                ratio=_ratio(own, other, lambda one: one.alone.cpu_s),
                time_ratio=_ratio(own, other, lambda one: float(np.median(one.alone.latencies_s))),
                busy_time_ratio=_ratio(own, other, lambda one: one.busy.elapsed_s),
            )
        return costs

    def measure_original(self) -> dict[int, VersionCost]:
        """Cost of the original alone, for a report without candidates."""
        return {
            rows: _cost([self._round(self._original, rows) for _ in range(self._num_rounds)]) for rows in self._requests
        }

    def _round(self, process: VersionProcess, rows: int) -> "_Round":
        num_requests = self._num_requests[rows]
        busy = process.measure(str(rows), max(num_requests, 2 * NUM_INFLIGHT), num_inflight=NUM_INFLIGHT)
        return _Round(process.measure(str(rows), num_requests), busy)


class _Round(NamedTuple):
    """The same requests one after another, and ``NUM_INFLIGHT`` at once."""

    alone: Sample
    busy: Sample


def _ratio(own: Sequence[_Round], other: Sequence[_Round], figure: Callable[[_Round], float]) -> float:
    return float(np.median([figure(b) / max(figure(a), 1e-9) for a, b in zip(own, other, strict=True)]))


def _cost(rounds: Sequence[_Round]) -> VersionCost:
    latencies_ms = np.concatenate([one.alone.latencies_s for one in rounds]) * 1000
    cpu_s = float(np.median([one.alone.cpu_s / max(one.alone.num_rows, 1) for one in rounds]))
    rows_per_s = float(np.median([one.busy.num_rows / max(one.busy.elapsed_s, 1e-9) for one in rounds]))
    p50, p99 = np.percentile(latencies_ms, [50, 99])
    return VersionCost(cpu_s * 1000, float(p50), float(p99), rows_per_s)


def objective_ratio(costs: Mapping[int, VersionCost], objective: str) -> float:
    """Time ratio for an objective: of one-row requests alone, or of rows in the largest requests, several at once."""
    return costs[min(costs)].time_ratio if objective == "latency" else costs[max(costs)].busy_time_ratio
