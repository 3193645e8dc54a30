"""A model version that loads on its first request."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import DeadlineExceededError, RequestCancelledError, UnavailableError, WeftError
from weft.base.statistics import ModelStatistics, failure_reason
from weft.serving.backends.base import ModelContext
from weft.serving.lifecycle.warm_pool import WarmPool
from weft.serving.runtime.crashed_instances import SLOW_S, CrashedInstances
from weft.serving.runtime.model import ServedModel
from weft.serving.runtime.sequence_model import SequenceModel


class OnDemandModel:
    """Answers as a ``ServedModel``; the first request after a pause waits until the model is loaded.

    It is ready as soon as its configuration is valid. Requests for a model that cannot be loaded get the reason.
    ``make`` makes the model for each load, with the statistics of all loads; the size of the files in the version's
    folder counts against the limit of ``pool``, which decides what is loaded.
    """

    def __init__(self, make: Callable[[ModelStatistics], ServedModel], context: ModelContext, pool: WarmPool) -> None:
        self.signature = signature = context.signature
        self.statistics = ModelStatistics(signature.name, signature.version)
        self.label = f"'{signature.name}' version {signature.version}"
        self._make = make
        self._directory = context.directory
        self._pool = pool
        self._served: ServedModel | None = None
        self._none_crashed = CrashedInstances(signature.name, 1)
        self._is_accepting = False
        self._grace_s = 0.0

    async def start(self) -> None:
        """Accept requests, without loading."""
        self._is_accepting = True

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``ServedModel.infer``, once the model is loaded.

        Raises DeadlineExceededError if the deadline passes during the load, and a WeftError if that fails.
        """
        async with self._in_use(context) as served:
            return await served.infer(call, context)

    async def stream(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``ServedModel.stream``, once the model is loaded. Raises as ``infer``."""
        async with (
            self._in_use(context) as served,
            contextlib.aclosing(served.stream(call, context)) as responses,
        ):
            async for response in responses:
                yield response

    @property
    def crashed(self) -> CrashedInstances:
        """Lost instances, while the model is loaded; a load that takes long counts as one."""
        return self._none_crashed if self._served is None else self._served.crashed

    async def stop(self, *, grace_s: float) -> None:
        """As ``ServedModel.stop``."""
        self._is_accepting = False
        self._grace_s = grace_s
        await self._pool.remove(self)

    async def num_bytes(self) -> int:
        """Size of the files in the version folder."""
        return await asyncio.to_thread(_size_bytes, self._directory)

    @property
    def is_held(self) -> bool:
        """Whether it has a stateful sequence, which an unload would end."""
        return isinstance(self._served, SequenceModel) and self._served.has_sequences

    async def warm(self) -> None:
        """Load the model. Raises WeftError."""
        served = self._make(self.statistics)
        if isinstance(served, SequenceModel):
            served.when_free(self._pool.freed)
        slow = asyncio.get_running_loop().call_later(SLOW_S, self._begin_slow_load)
        try:
            await served.start()
        finally:
            slow.cancel()
            self._none_crashed.remove(self)
        self._served = served

    def _begin_slow_load(self) -> None:
        reason = f"model {self.label} has been loading for {SLOW_S:g} s"
        self._none_crashed.add(self, reason, is_hung=True, is_loading=True)

    async def cool(self) -> None:
        """Unload the model; running requests are answered within the grace of ``stop``."""
        served, self._served = self._served, None
        if served is not None:
            await served.stop(grace_s=self._grace_s)

    @contextlib.asynccontextmanager
    async def _in_use(self, context: CallContext) -> AsyncIterator[ServedModel]:
        if not self._is_accepting:
            raise self._unloading()
        if not self._pool.try_enter(self):
            await self._enter(context)
        try:
            if self._served is None:
                raise self._unloading()
            yield self._served
        finally:
            self._pool.leave(self)

    async def _enter(self, context: CallContext) -> None:
        left_s = None if context.deadline_ns is None else max(0.0, (context.deadline_ns - time.monotonic_ns()) / 1e9)
        try:
            async with asyncio.timeout(left_s):
                await self._pool.enter(self)
        except TimeoutError:
            raise self._failed(
                DeadlineExceededError(
                    f"the deadline passed while model {self.label} was being loaded; it loads on the first request, so "
                    "give that one more time"
                ),
                context,
            ) from None
        except WeftError as error:
            raise self._failed(
                UnavailableError(f"model {self.label} cannot be loaded: {error.message}"), context
            ) from error
        except asyncio.CancelledError:
            self._failed(RequestCancelledError("the request was cancelled"), context)
            raise

    def _unloading(self) -> UnavailableError:
        return UnavailableError(f"model {self.label} is not at ready state: it is being unloaded; try again later")

    def _failed(self, error: WeftError, context: CallContext) -> WeftError:
        self.statistics.record_failure(failure_reason(error.code), time.monotonic_ns() - context.arrival_ns)
        return error


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
