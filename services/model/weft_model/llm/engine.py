"""The engine: a thread that runs steps while anybody waits for a token, and the calls that other threads may make."""

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from weft_common.errors import InternalError, ResourceExhaustedError, UnavailableError, WeftError
from weft_common.observing.logs import get_logger
from weft_model.llm.config import EngineConfig, TransformerConfig
from weft_model.llm.engine_core import EngineCore, Runner
from weft_model.llm.metrics import EngineMetrics
from weft_model.llm.request import EngineRequest
from weft_model.llm.request_limits import RequestLimits
from weft_model.llm.scheduler.blocks import BlockPool

_LOG = get_logger("weft.llm")

#: The state is checked once nothing has come for so long; a request that follows another at once does not wait for it.
_IDLE_S = 0.1
#: Beyond its grace, ``stop`` waits so long for the step under way.
_STEP_GRACE_S = 5.0

#: What to do with a request; None only wakes the thread.
_Message = tuple[Callable[[EngineRequest], None], EngineRequest] | None


class Engine:
    """Runs a model for many requests at a time.

    Its thread alone touches the state. Other threads put messages into a queue, which it reads before every step and
    sleeps on when there is nothing to do.

    Args:
        runner: Runs steps; the engine's from now on.
        config: Resolved for the model.
        model_config: What ends a text, and what a token is.
        metrics: Is told what happens; made here when absent.
        after_deltas: Called on the engine's thread after every step and every message that may have given deltas, so
            that sinks can collect them and wake another thread once.
        on_lost: Called on the engine's thread when it ends by a defect, with the error that its requests got.
        clock_ns: Monotonic time in nanoseconds.

    Attributes:
        metrics: Latencies, rates, occupancy.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        *,
        model_config: TransformerConfig,
        metrics: EngineMetrics | None = None,
        after_deltas: Callable[[], None] = lambda: None,
        on_lost: Callable[[WeftError], None] = lambda error: None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.metrics = metrics or EngineMetrics(config, model_config)
        self._runner = runner
        self._max_queued = config.max_queued
        self._after_deltas = after_deltas
        self._on_lost = on_lost
        self._clock_ns = clock_ns
        self._limits = RequestLimits(config, model_config, runner.num_blocks)
        self._core = EngineCore(runner, config, model_config, self.metrics, clock_ns)
        # Putting into it is reentrant, so that a sink and even a finalizer may cancel.
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._stop_ns: int | None = None
        self._end_error: WeftError | None = None  # what requests get once the thread reads no more

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs: it was started, and neither was stopped nor is lost."""
        return self._thread.is_alive()

    @property
    def is_accepting(self) -> bool:
        """Whether ``submit`` takes requests: nobody has called ``stop``, and the thread is not lost. Any thread."""
        return self._stop_ns is None and self._end_error is None

    @property
    def busy_since_ns(self) -> int:
        """When the step under way began, by ``clock_ns``; 0 between steps. For a watchdog; any thread."""
        return self._core.busy_since_ns

    @property
    def num_waiting(self) -> int:
        """Sequences without a seat; of a request that the thread has not read yet, one. Any thread."""
        return self._core.scheduler.num_waiting + self._inbox.qsize()

    @property
    def num_running(self) -> int:
        """Sequences with a seat. Any thread."""
        return self._core.scheduler.num_running

    @property
    def num_preemptions(self) -> int:
        """Seats that were taken from sequences so far. Any thread."""
        return self._core.scheduler.num_preemptions

    @property
    def pool(self) -> BlockPool:
        """Blocks of the KV cache; other threads than the engine's may read its counts."""
        return self._core.pool

    def start(self) -> None:
        """The thread runs and serves requests."""
        self._thread.start()

    def stop(self, grace_s: float) -> bool:
        """The thread has ended and nothing is accepted any more.

        Args:
            grace_s: Requests may finish for so long; those that do not end with ``UnavailableError``.

        Returns:
            Whether the thread has ended; a step that hangs keeps it.
        """
        self._stop_ns = self._clock_ns() + round(grace_s * 1e9)
        self._inbox.put(None)
        if self._thread.ident is None:
            self._end(UnavailableError("the engine was stopped before it was started"))
        else:
            self._thread.join(grace_s + _STEP_GRACE_S)
        return not self._thread.is_alive()

    def submit(self, request: EngineRequest) -> None:
        """The request waits for its turn; its sink gets deltas until one of them is the last. Any thread.

        Raises:
            InvalidArgumentError: The engine could never serve it.
            ResourceExhaustedError: ``max_queued`` sequences wait already.
            UnavailableError: The engine stops, has stopped or was lost.
        """
        if not self.is_accepting:
            raise UnavailableError("the engine takes no requests: it is stopping, has stopped or was lost").refused()
        self._limits.check(request)
        if 0 < self._max_queued <= self.num_waiting:
            raise ResourceExhaustedError(
                f"Exceeds maximum queue size: {self._max_queued} sequences wait already; try again later"
            )
        request.arrival_ns = request.arrival_ns or self._clock_ns()
        self._inbox.put((self._core.admit, request))
        if self._end_error is not None:  # the thread may have ended without reading it
            self._refuse_unread(self._end_error)

    def cancel(self, request: EngineRequest) -> None:
        """The request gets no delta any more, but for one being given just now; it is freed before the next step.

        Any thread, also from a sink. Without effect on a request that has ended.
        """
        request.is_cancelled = True
        self._inbox.put((self._core.drop, request))

    def finish(self, request: EngineRequest, choice: int) -> None:
        """The choice has what it wanted, such as a stop string: it is freed before the next step, and the others go on.

        Once all choices have ended the request has, and counts as answered. Deltas that are on their way still come;
        none of them is the last if this ends the request. Any thread; without effect on a choice that has ended.
        """
        self._inbox.put((partial(self._core.finish, choice=choice), request))

    def _run(self) -> None:
        try:
            self._runner.bind_thread()
            self._serve()
        except BaseException as exception:  # the thread ends here whatever it is, and nobody must wait for it
            error = InternalError("the engine was lost")
            _LOG.exception("the engine was lost", extra={"error_id": error.error_id}, exc_info=exception)
            self._end(error)
            self._on_lost(error)
        else:
            self._end(UnavailableError("the engine stopped before the request was finished"))

    def _serve(self) -> None:
        core = self._core
        while True:
            self._read_inbox()
            now_ns = self._clock_ns()
            core.expire(now_ns)
            if self._stop_ns is not None and (not core.has_requests or now_ns >= self._stop_ns):
                return
            if core.has_requests:
                core.step()
            self._after_deltas()

    def _read_inbox(self) -> None:
        """Act on every message; sleep until there is one if there is nothing else to do."""
        inbox = self._inbox
        if not self._core.has_requests and self._stop_ns is None:
            self._act(self._wait())
        for _ in range(inbox.qsize()):  # what comes meanwhile waits for a step, so that no flood of messages stops them
            self._act(inbox.get())

    def _wait(self) -> _Message:
        try:
            return self._inbox.get(timeout=_IDLE_S)
        except Empty:
            self._core.scheduler.check()
            return self._inbox.get()

    def _act(self, message: _Message) -> None:
        if message is not None:
            handle, request = message
            handle(request)

    def _end(self, error: WeftError) -> None:
        """Every request has ended with ``error``; those that come later do, too."""
        self._end_error = error
        self._core.end_all(error)
        self._refuse_unread(error)
        self._after_deltas()

    def _refuse_unread(self, error: WeftError) -> None:
        """Requests in the inbox, which the thread reads no more, have got ``error``. Any thread."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if message is not None and message[0] == self._core.admit:
                self._core.refuse(message[1], error)
