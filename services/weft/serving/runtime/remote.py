"""One instance of a model that runs in another process: all of it is on the event loop, without a thread."""

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from typing_extensions import override

from weft.base.errors import UnavailableError, WeftError
from weft.serving.backends.base import Backend, Batch
from weft.serving.request.request import InferenceRequest, Outcome
from weft.serving.runtime.idle import STABLE_S
from weft.serving.runtime.instance import Instance, Lane, pause_before, resolve, why_not_again


class RemoteInstance(Instance):
    """As ``Instance``, of a backend that ``is_remote``."""

    _backend: Backend | None = None
    _is_open = False
    _keeping: "asyncio.Task[None] | None" = None  # loads, loads again, or closes
    _num_losses = 0
    _held: list[tuple[Lane, Batch]]

    @override
    def _begin(self) -> None:
        self._held = []
        self._keeping = asyncio.ensure_future(self._open())

    @override
    def execute(self, requests: Sequence[InferenceRequest], lane: Lane | None = None) -> None:
        lane = lane or self
        if self._execution_timeout_s:
            self._begin_execution(lane)
        batch = Batch([request for request in requests if not request.is_cancelled])
        if self._backend is not None and batch.requests:
            self._backend.start(batch, partial(self._end_batch, lane, batch))
        else:  # the callers have left in this turn of the event loop
            asyncio.get_running_loop().call_soon(self._end_batch, lane, batch, [])

    @override
    def close(self) -> "asyncio.Future[None]":
        closed = self._closed
        if closed is None:
            return super().close()
        if self._keeping is not None and not self._keeping.done():
            self._keeping.cancel()
            self.abort()
        self._is_open = False
        self._keeping = asyncio.ensure_future(self._shut(closed))
        return closed

    def _end_batch(self, lane: Lane, batch: Batch, outcomes: list[Outcome] | None) -> None:
        if outcomes is None:
            self._held.append((lane, batch))
        else:
            self._end_execution(self._runner.conclude(batch, outcomes), lane)

    def _release(self, error: WeftError | None = None) -> None:
        """Execute what the lost process had not begun, or fail it."""
        held, self._held = self._held, []
        for lane, batch in held:
            if error is None:
                self.execute(batch.requests, lane)
            else:
                self._end_batch(lane, batch, [error.with_message(error.message) for _ in batch.requests])

    async def _open(self) -> None:
        try:
            model = replace(self._model, signature=self._model.signature.for_backend())
            self._backend = backend = self._backend_class(model, self._context)
            backend.on_lost = self._on_lost
            self._abort = backend.abort
            await self._load(backend)
        except asyncio.CancelledError:
            if self._loaded is not None:
                resolve(self._loaded, UnavailableError(f"{self._what} was closed while it was loaded"))
            raise
        except Exception as exception:
            if self._loaded is not None:
                resolve(self._loaded, self._load_failure(exception))
        else:
            if self._can_overlap and backend.num_at_once > 1:
                self.num_at_once = backend.num_at_once
            num_lanes = self.num_at_once if self.num_at_once > 1 else 1 + self._num_ahead
            self.lanes += [Lane(self, self.name) for _ in range(num_lanes - 1)]
            if self._loaded is not None:
                resolve(self._loaded, None)

    async def _load(self, backend: Backend) -> None:
        await backend.open()
        if loss := backend.why_lost():  # meanwhile
            raise UnavailableError(loss)
        self._is_open, self._loaded_s = True, time.monotonic()

    @override
    def _on_lost(self) -> None:
        if self._backend is None or not self._is_open:
            return  # whoever loads or closes it finds out
        self._is_open = False
        self._num_losses = self._num_losses + 1 if time.monotonic() - self._loaded_s < STABLE_S else 1
        loss = self._backend.why_lost()
        self._begin_crash(loss)
        self._keeping = asyncio.ensure_future(self._open_again(self._backend, loss))

    async def _open_again(self, backend: Backend, loss: str) -> None:
        for attempt in itertools.count(self._num_losses - 1):
            await asyncio.sleep(pause_before(attempt))
            self._begin_load()
            try:
                await self._load(backend)
            except Exception as error:
                self._begin_crash(f"{loss}; {why_not_again(error)}")
                self._release(UnavailableError(f"{self._what} is lost"))
            else:
                self._release()  # before what came later
                self._report_crash(self, "")
                return
            finally:
                self._end_load()

    async def _shut(self, closed: "asyncio.Future[None]") -> None:
        self._release(UnavailableError(f"{self._what} is closed"))
        try:
            if self._backend is not None:
                await self._backend.shut()
        finally:
            self._abort = None
            resolve(closed, None)
