"""The responses of one decoupled request, passed from the model's threads to the event loop."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, NamedTuple, TypeVar

from weft.base.core import InferResult
from weft.base.errors import InternalError, WeftError

ResponseT = TypeVar("ResponseT")

#: Responses of one request that are sent and not yet taken by its reader; beyond it the model waits in ``send``.
MAX_WAITING = 16
#: The same in bytes of outputs; one response may always wait, however large.
MAX_WAITING_BYTES = 16 << 20


class SendWindow:
    """Limits the unread responses of one request. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sizes: deque[int] = deque()
        self._num_bytes = 0
        self._is_closed = False

    def has_room(self, num_bytes: int) -> bool:
        """Whether ``enter`` returns at once."""
        is_full = len(self._sizes) >= MAX_WAITING or self._num_bytes + num_bytes > MAX_WAITING_BYTES
        return self._is_closed or not self._sizes or not is_full

    def enter(self, num_bytes: int) -> bool:
        """Wait for room and take it; return False at once if the window is closed."""
        with self._changed:
            while not self.has_room(num_bytes):
                self._changed.wait()
            if self._is_closed:
                return False
            self._sizes.append(num_bytes)
            self._num_bytes += num_bytes
            return True

    def leave(self) -> None:
        """Release the room of the oldest response."""
        with self._changed:
            if self._sizes:
                self._num_bytes -= self._sizes.popleft()
                self._changed.notify_all()

    def close(self) -> None:
        """Release every waiting sender, now and later."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


class Sent(NamedTuple):
    """One response as the model sent it; the last one ``is_final``, or is an error."""

    answer: InferResult | WeftError
    sent_ns: int
    encode_ns: int


class ResponseStream(Generic[ResponseT]):
    """Iterates over the responses of one request; an error that ends it is raised after the responses before it.

    The model sends from any thread; the callbacks run on ``loop``, where the stream is read.

    Args:
        encode: Makes the result of a response; raises InternalError for one that does not fit the configuration.
        null: Makes the empty result that says that no response follows.
        on_sent: Called for each response with its number, from 0, and when the one before it was sent.
        on_end: Called once, when the model has sent its last response, with the error if that is one.

    Attributes:
        on_taken: Called for each response that was read.
        on_over: Called, maybe twice, when the stream has ended.
        is_over: The stream has ended; responses may still be unread.
        has_last: The model has sent its last response.
        num_sent: Responses that the model has sent.
        last_ns: When it sent the latest one, or when the stream was made; ``time.monotonic_ns``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        encode: Callable[[ResponseT], InferResult],
        null: Callable[[], InferResult],
        on_sent: Callable[[int, Sent, int], None],
        on_end: Callable[[WeftError | None], None],
    ) -> None:
        self._loop = loop
        self._encode = encode
        self._null = null
        self._on_sent = on_sent
        self._on_end = on_end
        self.on_taken: Callable[[], None] | None = None
        self.on_over: Callable[[], None] | None = None
        self._window = SendWindow()
        # What follows belongs to the loop.
        self._sent: deque[InferResult | WeftError] = deque()
        self.num_sent = 0
        self.last_ns = time.monotonic_ns()
        self.is_over = False
        self.has_last = False
        self._waiter: asyncio.Future[None] | None = None

    def send(self, response: ResponseT | WeftError | None, *, is_final: bool) -> None:
        """Send a response; wait while too many are unread; drop it after the end. None: no response follows."""
        sent = self._encoded(response, is_final)
        outputs = () if isinstance(sent.answer, WeftError) else sent.answer.outputs.values()
        if self._window.enter(sum(len(tensor.data) for tensor in outputs)):
            self._on_loop(self._arrive, sent)

    def deliver(self, response: ResponseT | WeftError | None, *, is_final: bool) -> None:
        """Like ``send``, but never wait: the sender keeps count by ``on_taken``."""
        self._on_loop(self._arrive, self._encoded(response, is_final))

    def lose(self, error: WeftError) -> None:
        """End the stream with an error because the model will not send its last response. Thread-safe."""
        self._on_loop(self._arrive, Sent(error, time.monotonic_ns(), 0))

    def drop(self) -> None:
        """Do nothing: the model has finished a withdrawn request. Thread-safe."""

    def fail(self, error: WeftError) -> None:
        """End the stream with an error that is not the model's. On the event loop, like all methods below."""
        if not self.is_over:
            self._sent.append(error)
            self._stop()

    def close(self) -> None:
        """Drop the unread responses and end the stream."""
        self._sent.clear()
        self._stop()

    def __aiter__(self) -> "ResponseStream[ResponseT]":
        return self

    async def __anext__(self) -> InferResult:
        while not self._sent:
            if self.is_over:
                raise StopAsyncIteration
            self._waiter = self._loop.create_future()
            await self._waiter
        answer = self._sent.popleft()
        self._window.leave()
        if self.on_taken is not None:
            self.on_taken()
        if isinstance(answer, WeftError):
            raise answer.with_message(answer.message)  # a copy, which does not hold this frame
        return answer

    def _encoded(self, response: ResponseT | WeftError | None, is_final: bool) -> Sent:
        sent_ns = time.monotonic_ns()
        answer: InferResult | WeftError
        if response is None:
            answer = self._null()
        elif isinstance(response, WeftError):
            answer = response if is_final else self._null()
            if isinstance(answer, InferResult):
                answer.is_final, answer.is_null, answer.error = False, False, response
        else:
            try:
                answer = self._encode(response)
                answer.is_final, answer.is_unordered = is_final, True
            except InternalError as error:
                answer = error
        return Sent(answer, sent_ns, time.monotonic_ns() - sent_ns)

    def _arrive(self, sent: Sent) -> None:
        if self.is_over:
            return
        self._sent.append(sent.answer)
        self._on_sent(self.num_sent, sent, self.last_ns)
        self.num_sent += 1
        self.last_ns = sent.sent_ns
        if isinstance(sent.answer, WeftError) or sent.answer.is_final:
            self.has_last = True
            self._stop()
            self._on_end(sent.answer if isinstance(sent.answer, WeftError) else None)
        else:
            self._wake()

    def _stop(self) -> None:
        self.is_over = True
        self._window.close()
        if self.on_over is not None:
            self.on_over()
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _on_loop(self, function: Callable[[Sent], None], sent: Sent) -> None:
        with suppress(RuntimeError):  # the loop is closed, and nobody reads
            self._loop.call_soon_threadsafe(function, sent)
