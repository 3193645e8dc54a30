"""One instance of a model: a thread that loads the backend, runs batches one after another, and closes it.

An instance that is inline runs its batches on the event loop.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from typing_extensions import override

from weft.base.core import InferResult
from weft.base.errors import InternalError, InvalidArgumentError, UnavailableError, WeftError
from weft.base.observing.failures import caused_by
from weft.base.observing.logs import get_logger
from weft.serving.backends.base import Backend, InstanceContext, ModelContext, TensorBackend
from weft.serving.backends.loading import why_unreadable
from weft.serving.request.request import InferenceRequest
from weft.serving.runtime import idle
from weft.serving.runtime.execution import BackgroundThread, BatchExecution, BatchRunner
from weft.serving.runtime.idle import PAUSES_S, STABLE_S

_LOG = get_logger("weft.serving")


class _ClosedError(Exception):
    """The instance is closed."""


class Lane:
    """Takes one of the batches that an instance executes at once."""

    def __init__(self, owner: "Instance", name: str) -> None:
        self.owner = owner
        self.name = name

    def execute(self, requests: Sequence[InferenceRequest]) -> None:
        """As ``Instance.execute``."""
        self.owner.execute(requests, self)


class Instance(Lane):
    """Owns one backend object and the only thread that touches it.

    An inline instance uses the thread only to load, reload and close the backend; ``execute`` runs the batch itself.

    Args:
        report: Called on the event loop once for each batch of ``execute``; inline, by that method itself.
        report_crash: Called on the event loop with the reason when the backend has crashed, before ``report`` if that
            was in a batch, and after each attempt to reload it, with "" when that succeeded. Also when a batch runs for
            too long, and with "" when it ends after all.
        execution_timeout_s: Longest execution; the backend then aborts the batch, if it can. 0: no limit.
        load_timeout_s: Longest load; it then fails, and the backend aborts it, if it can. 0: no limit.
        has_background: Run batches in the background too, if the backend can.
        can_overlap: Execute several batches at once, if the backend can.
        num_ahead: Batches that one in another process may have beside the one that it executes.

    Attributes:
        lanes: Take a batch each; one is the instance itself. Known after the load, as is ``num_at_once``.
        num_at_once: Batches that it executes at the same time.
        background: Runs batches beside those of ``execute``, and reports them itself; None if the backend or the
            operating system cannot. Known after the load.
        is_hung: Whether a batch exceeds ``execution_timeout_s``.
        is_slow: Whether the crashed backend has been reloading for ``SLOW_S``.
    """

    def __init__(
        self,
        model: ModelContext,
        backend: type[Backend],
        context: InstanceContext,
        report: Callable[[Lane | BackgroundThread, BatchExecution], None],
        report_crash: Callable[["Instance", str], None] = lambda instance, reason: None,
        execution_timeout_s: float = 0.0,
        load_timeout_s: float = 0.0,
        *,
        has_background: bool = False,
        can_overlap: bool = False,
        num_ahead: int = 0,
    ) -> None:
        super().__init__(self, context.name)
        self.lanes: list[Lane] = [self]
        self.num_at_once = 1
        self._can_overlap = can_overlap
        self._num_ahead = num_ahead
        self._model = model
        self._backend_class = backend
        self._context = context
        self._report = report
        self._report_crash = report_crash
        self._runner = BatchRunner(model.signature, context.name, checks_outputs=backend.checks_outputs)
        self._inbox: SimpleQueue[Sequence[InferenceRequest] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[WeftError | None] | None = None
        self._closed: asyncio.Future[None] | None = None
        self._loaded_s = 0.0
        self._abort: Callable[[], None] | None = None
        self._inline: Backend | None = None  # while it may execute on the event loop
        self._execution_timeout_s = execution_timeout_s
        self._started_s: dict[Lane, float] = {}  # the batches that run, by the clock of the loop; only with a limit
        self._overdue: asyncio.TimerHandle | None = None
        self._what = f"instance {self.name} of model '{model.signature.name}'"
        self._load_timeout_s = load_timeout_s
        self._load_timer: asyncio.TimerHandle | None = None
        self.is_hung = self.is_slow = False
        self._has_background = has_background
        self.background: BackgroundThread | None = None

    @property
    def is_loading(self) -> bool:
        """Whether ``load`` of the backend may still run, possibly after its caller has left."""
        return self._loaded is not None and (not self._loaded.done() or self._loaded.cancelled())

    async def load(self) -> None:
        """Load the backend, which then waits for batches. Raises a WeftError; the thread has then ended."""
        self._loop = asyncio.get_running_loop()
        self._loaded = self._loop.create_future()
        self._closed = self._loop.create_future()
        self._begin()
        self._begin_load()
        try:
            error = await self._loaded
        finally:
            self._end_load()
        if error is not None:
            raise error

    def _begin(self) -> None:
        # A daemon, so that a model that never returns cannot keep the process alive after the grace of a shutdown.
        threading.Thread(target=self._run, name=self.name, daemon=True).start()

    @override
    def execute(self, requests: Sequence[InferenceRequest], lane: Lane | None = None) -> None:
        """Run the requests as one batch after earlier ones; ``report`` gets the outcome."""
        backend = self._inline
        if backend is not None:
            execution = self._runner.run(backend, requests)
            if backend.why_lost():
                self._on_lost()
            self._report(self, execution)
            return
        if self._execution_timeout_s:
            self._begin_execution(self)
        self._inbox.put(requests)

    def close(self) -> "asyncio.Future[None]":
        """Close the backend after earlier batches; the future is done when it is closed, or was never loaded."""
        self._inline = None
        if self._closed is None:
            self._closed = asyncio.get_running_loop().create_future()
            self._closed.set_result(None)
        self._inbox.put(None)
        return self._closed

    def _run(self) -> None:
        try:
            model = replace(self._model, signature=self._model.signature.for_backend())
            backend = self._backend_class(model, self._context)
            backend.on_lost = self._on_lost
            self._abort = backend.abort
            backend.load()
        except BaseException as exception:  # even SystemExit from user code must not leave the loader waiting
            self._on_loop(resolve, self._loaded, self._load_failure(exception))
        else:
            self._loaded_s = time.monotonic()
            if self._context.is_inline:
                self._inline = backend
            if self._has_background and isinstance(backend, TensorBackend) and backend.can_share_processor():
                checks = self._backend_class.checks_outputs
                runner = BatchRunner(self._model.signature, self.name, checks_outputs=checks)
                background = BackgroundThread(runner, self.name, partial(self._on_loop, self._report))
                if background.start(backend):
                    self.background = background
            self._on_loop(resolve, self._loaded, None)
            self._serve(backend)
            self._inline = None
            del backend  # it is gone, not only closed, when ``close`` ends
        self._abort = None
        self._on_loop(resolve, self._closed, None)

    def _load_failure(self, exception: BaseException) -> WeftError:
        fault = why_unreadable(self._model.directory)
        if isinstance(exception, WeftError):
            return InvalidArgumentError(fault) if fault else exception
        where = f"model '{self._model.signature.name}' failed to load on instance {self.name}"
        return caused_by(InternalError(f"{where}: {fault or f'{type(exception).__name__}: {exception}'}"), exception)

    def _on_lost(self) -> None:
        """Have the thread reload the backend; it gets the batches until then. Any thread."""
        self._inline = None
        self._inbox.put(())

    def abort(self) -> None:
        """Abort a hanging load, batch or close, if the backend can."""
        if self._abort is not None:
            self._abort()

    def _serve(self, backend: Backend) -> None:
        num_losses = 0
        requests = self._inbox.get()
        while requests is not None:
            execution = self._runner.run(backend, requests) if requests and not backend.why_lost() else None
            if loss := backend.why_lost():
                self._on_loop(self._begin_crash, loss)
            if execution is not None:
                self._on_loop(self._end_execution, execution)
                requests = ()
            del execution  # an idle instance keeps no tensors in memory
            if loss:
                num_losses = num_losses + 1 if time.monotonic() - self._loaded_s < STABLE_S else 1
                requests = self._load_again(backend, loss, num_losses, requests)
                if self._context.is_inline and requests is not None:
                    self._inline = backend
            else:
                requests = self._inbox.get()
        if self.background is not None:
            self.background.close()
        try:
            backend.close()
        except BaseException as exception:
            self._runner.log(InternalError(f"model '{self._model.signature.name}' raised in close"), exception)

    def _begin_crash(self, reason: str) -> None:
        _LOG.error("%s", reason, extra={"model": self._model.signature.name, "instance": self.name})
        self.is_hung = self.is_slow = False
        self._report_crash(self, reason)

    def _begin_execution(self, lane: Lane) -> None:
        if self._loop is not None:
            self._started_s[lane] = self._loop.time()
            if self._overdue is None:
                self._overdue = self._loop.call_later(self._execution_timeout_s, self._check_overdue, self._loop)

    def _check_overdue(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check the running batches; the timer may belong to an earlier one."""
        self._overdue = None
        if not self._started_s:
            return
        left_s = min(self._started_s.values()) + self._execution_timeout_s - loop.time()
        if left_s > 0.001:  # event loops count timers in milliseconds
            self._overdue = loop.call_later(left_s, self._check_overdue, loop)
        else:
            self._hang()

    def _hang(self) -> None:
        self.is_hung = True
        start = datetime.now(UTC) - timedelta(seconds=self._execution_timeout_s)
        reason = (
            f"{self._what} has executed one batch since "
            f"{start.isoformat(timespec='milliseconds')}, longer than its execution_timeout_us, and takes no other"
        )
        _LOG.error("%s", reason, extra={"model": self._model.signature.name, "instance": self.name})
        self._report_crash(self, reason)
        self.abort()

    def _end_execution(self, execution: BatchExecution, lane: Lane | None = None) -> None:
        lane = lane or self
        self._started_s.pop(lane, None)
        if self.is_hung:
            _LOG.warning("instance %s has ended the batch after all, and takes others", self.name)
            self._report_crash(self, "")
            self.is_hung = False
        self._report(lane, execution)

    def _begin_load(self) -> None:
        self._report_load_after(idle.SLOW_S, 0.0)

    def _end_load(self) -> None:
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        self.is_slow = False

    def _report_load_after(self, pause_s: float, passed_s: float) -> None:
        if self._load_timeout_s:
            pause_s = min(pause_s, self._load_timeout_s - passed_s)
        loop = asyncio.get_running_loop()
        self._load_timer = loop.call_later(pause_s, self._report_load, passed_s + pause_s)

    def _report_load(self, passed_s: float) -> None:
        """Log a slow load, and fail it at its limit; calls do not wait for reloading a lost backend."""
        if self._load_timeout_s and passed_s >= self._load_timeout_s:
            self._load_timer = None
            text = f"{self._what} was not loaded within {passed_s:g} s, its load_timeout_s"
            _LOG.error("%s", text)
            if self._loaded is not None:
                fault = f"{text}; if it needs longer, raise that parameter of the model"
                resolve(self._loaded, UnavailableError(fault))
            self.abort()
            return
        text = f"{self._what} has been loading for {passed_s:g} s: its import or initialize does not return"
        _LOG.warning("%s", text)
        if passed_s == idle.SLOW_S and self._loaded is not None and self._loaded.done():
            self.is_slow = True
            self._report_crash(self, text)
        self._report_load_after(idle.PERIOD_S, passed_s)

    def _load_again(
        self, backend: Backend, loss: str, num_losses: int, held: Sequence[InferenceRequest]
    ) -> Sequence[InferenceRequest] | None:
        """Retry until the lost backend is loaded; returns the batch that arrived before the loss was known.

        That batch, possibly already ``held``, fails at the first attempt. None: the instance is closed.
        """
        for attempt in itertools.count(num_losses - 1):
            pause_s = pause_before(attempt)
            try:
                held = self._next_within(pause_s) or held
                self._on_loop(self._begin_load)
                try:
                    backend.load()
                finally:
                    self._on_loop(self._end_load)
            except _ClosedError:
                self._fail(held)
                return None
            except BaseException as error:  # what user code raises must not end the attempts
                self._on_loop(self._begin_crash, f"{loss}; {why_not_again(error)}")
                self._fail(held)
                held = ()
            else:
                self._loaded_s = time.monotonic()
                self._on_loop(self._report_crash, self, "")
                return held
        return None

    def _next_within(self, pause_s: float) -> Sequence[InferenceRequest]:
        """Wait up to that long for a batch. Raises _ClosedError if the instance is closed meanwhile."""
        held: Sequence[InferenceRequest] = ()
        end_s = time.monotonic() + pause_s
        while True:
            try:
                requests = self._inbox.get(timeout=max(0.0, end_s - time.monotonic()))
            except Empty:
                return held
            if requests is None:
                self._fail(held)
                raise _ClosedError
            held = requests or held

    def _fail(self, requests: Sequence[InferenceRequest]) -> None:
        members = [request for request in requests if not request.is_cancelled]
        if requests:
            error = UnavailableError(f"{self._what} is lost")
            answers: list[InferResult | WeftError | None] = [error.with_message(error.message) for _ in members]
            now_ns = time.monotonic_ns()
            self._on_loop(self._end_execution, BatchExecution(members, answers, 0, now_ns, now_ns, now_ns, now_ns))

    def _on_loop(self, function: Callable[..., None], *args: Any) -> None:
        if self._loop is not None:
            try:
                self._loop.call_soon_threadsafe(function, *args)
            except RuntimeError:
                _LOG.debug("instance %s: the event loop is closed", self.name)


def pause_before(attempt: int) -> float:
    """Seconds to wait before an attempt to load a lost backend again, from 0."""
    return PAUSES_S[min(attempt - 1, len(PAUSES_S) - 1)] if attempt else 0.0


def why_not_again(error: BaseException) -> str:
    """Why a lost backend is not loaded again."""
    return f"it cannot be loaded again: {error.message if isinstance(error, WeftError) else repr(error)}"


def resolve(future: "asyncio.Future[Any]", result: object) -> None:
    """Set the result, unless nobody waits any longer."""
    if not future.done():
        future.set_result(result)
