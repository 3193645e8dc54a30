"""A version of a model in a process of its own, where it is tried and its CPU time is measured."""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from weft.base.core import CallContext, InferCall
from weft.base.errors import UnavailableError
from weft.base.signature import ModelSignature
from weft.base.tensors import WireTensor, encode
from weft.optimize.methods.method import Inputs
from weft.serving.core import ServingCore
from weft.tools.offline import BACKENDS

_GRACE_S = 10.0
_JOIN_S = 20.0
#: Loading a model, compiling it for instance, may take long.
_START_LIMIT_S = 600.0
_CALL_LIMIT_S = 600.0


class Sample(NamedTuple):
    """What some requests took.

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
    """Serves one model without a network: requests pass its queue, its batcher and its backend, as in a service.

    A version that crashes takes its own process with it.

    Args:
        repository: Staged; the one version of the model is served.
        service: Folder of models in it; "" where they lie side by side.
        model: Its name.
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

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self.close()

    def send(self, name: str, requests: Sequence[Inputs]) -> None:
        """Give it a set of requests, which it answers once to warm up.

        Raises:
            UnavailableError: It fails at one of them, or dies.
        """
        self._ask((name, [{key: encode(array) for key, array in request.items()} for request in requests]))

    def measure(self, name: str, num_requests: int, num_inflight: int = 1) -> Sample:
        """Answer requests of a set in turn, some at once, and say what that took. Raises as ``send``."""
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
    """The process."""
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
        await _Server(pipe, core, model, has_batch).run()
    else:
        reasons = [entry.reason for entry in core.index(ready_only=False) if entry.name == model]
        pipe.send(("; ".join(reasons) or "it does not become ready", None))
    await core.close(grace_s=_GRACE_S)


class _Server:
    def __init__(self, pipe: Connection, core: ServingCore, model: str, has_batch: bool) -> None:
        self._pipe = pipe
        self._core = core
        self._model = model
        self._has_batch = has_batch
        self._sets: dict[str, list[dict[str, WireTensor]]] = {}

    async def run(self) -> None:
        while True:
            try:
                name, what = await asyncio.to_thread(self._pipe.recv)
            except (EOFError, OSError):
                return
            try:
                if isinstance(what, tuple):
                    answer: Any = await self._measure(self._sets[name], *what)
                else:
                    self._sets[name] = what
                    answer = await self._measure(what, len(what))
            except Exception as error:
                self._pipe.send((f"it fails at a request: {error}", None))
            else:
                self._pipe.send(("", answer))

    async def _measure(
        self, requests: Sequence[Mapping[str, WireTensor]], num_requests: int, num_inflight: int = 1
    ) -> tuple[Any, ...]:
        latencies_s = []
        num_rows = 0
        indices = iter(range(num_requests))

        async def send() -> None:
            nonlocal num_rows
            for index in indices:
                inputs = dict(requests[index % len(requests)])
                rows = next(iter(inputs.values())).shape[0] if self._has_batch else 1
                call = InferCall(self._model, inputs=inputs, num_rows=rows)
                start_s = time.perf_counter()
                await self._core.infer(call, CallContext())
                latencies_s.append(time.perf_counter() - start_s)
                num_rows += rows

        begin_s, cpu_s = time.perf_counter(), _cpu_s()
        await asyncio.gather(*(send() for _ in range(num_inflight)))
        return time.perf_counter() - begin_s, latencies_s, _cpu_s() - cpu_s, num_rows


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
