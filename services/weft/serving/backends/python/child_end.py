"""The end of the pipe in a model's process: whoever has nothing to do but to wait reads it."""

import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from weft.base.processes.forks import IN_COPY, end_copies, is_copy
from weft.serving.backends.python.pipe import Blocks, FrameReader, Message, Outgoing, Pipe, framed, room
from weft.serving.backends.python.responses import TritonModelException


class ChildEnd:
    """One end of the pipe. Any thread may send, and wait for an answer.

    The main thread reads when it has nothing to run, and a thread that waits for an answer reads meanwhile. Only where
    another one is reading already, as where a model has threads that call, a thread is started that reads from then on:
    it costs each execution two more changes of thread, some 30 us of CPU.

    Args:
        on_message: Called with each message but work, and the contents of its block, by the thread that reads.
        on_work: As ``on_message``, of ``load``, ``complete``, ``execute`` and ``close``; returns what ``next`` does.

    Attributes:
        is_read: The main thread never does anything that others wait for, but reads.
        had_work: What ``next`` has returned had come before it was called.
    """

    def __init__(
        self,
        pipe: Pipe,
        on_message: Callable[[Message, Any], None],
        on_work: Callable[[Message, Any], Any],
    ) -> None:
        self._connection, ours, self._theirs = pipe
        self._connection.set_inheritable(False)
        self._on_message, self._on_work = on_message, on_work
        self._reader = FrameReader(self._connection)
        self._blocks = Blocks(ours)
        self._returned: deque[int] = deque()  # blocks of this process that the service has read
        self._posted: deque[Message] = deque()
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._sending = threading.Lock()
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_read = self.had_work = False
        end_copies(self._connection.close)
        os.register_at_fork(before=self._theirs.keep_loans)

    def send(self, *message: Any, outgoing: Outgoing | None = None) -> None:
        """Send a message of builtins and of the tensors that ``outgoing`` has packed; waits while the service is slow.

        Raises TritonModelException for what cannot be sent, and in a forked copy of the process.
        """
        if is_copy():
            raise TritonModelException(IN_COPY)
        with self._sending:
            self._send(message, outgoing)
        self._flush()

    def post(self, *message: Any) -> None:
        """Send a message now, or behind what is just being sent: also out of a ``__del__`` in the middle of that."""
        if not is_copy():  # what the copy drops, the process itself may still have
            self._posted.append(message)
            self._flush()

    def _flush(self) -> None:
        while self._posted and self._sending.acquire(blocking=False):
            try:
                self._send(self._posted.popleft(), None)
            finally:
                self._sending.release()

    def _send(self, message: Message, outgoing: Outgoing | None) -> None:
        while self._returned:
            self._blocks.give_back(self._returned.popleft())
        block = None
        if outgoing is not None and (large := outgoing.large):
            sizes = [len(content) for content in large]
            block = self._blocks.take(room(sizes)), sizes
            self._blocks.file.write(block[0], large)
        freed = []
        while self._theirs.freed:
            freed.append(self._theirs.freed.popleft())
        try:
            self._connection.sendall(framed((freed, block, *message)))
        except ValueError as error:
            self._theirs.freed.extend(freed)
            raise TritonModelException(f"this cannot be sent to the service: {error}") from None
        except OSError:
            os._exit(0)  # the service is gone, and with it every caller

    def next(self) -> Any:
        """Work, in order; waits for it. On the main thread."""
        self.had_work = not self._work.empty()
        while self._work.empty():
            if self._thread is not None or not self._reading.acquire(blocking=self.is_read):
                self.read_aside()
                break
            try:
                self._read()
            finally:
                self._reading.release()
        return self._work.get()

    def poll(self) -> None:
        """Take what has come, unless another thread reads anyway."""
        if self._thread is None and not is_copy() and self._reading.acquire(blocking=False):
            try:
                self._read(socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            finally:
                self._reading.release()

    def wait_for(self, future: "Future[Any]") -> None:
        """Read until the future is done, or have another thread read until the end."""
        while not (future.done() or self.is_read):
            if self._thread is not None or not self._reading.acquire(blocking=False):
                self.read_aside()
                return
            try:
                self._read()
            finally:
                self._reading.release()

    def read_aside(self) -> None:
        """Have a thread read from now on; the one that reads now leaves it to that one when it has got something."""
        if self._thread is None and not self.is_read:
            self._thread = threading.Thread(target=self._read_on, name="read", daemon=True)
            self._thread.start()

    def _read_on(self) -> None:
        with self._reading:
            while True:
                self._read()

    def _read(self, flags: int = 0) -> None:
        try:
            messages = self._reader.read(flags)
        except BlockingIOError:
            raise
        except (EOFError, OSError):
            os._exit(0)
        for freed, block, *message in messages:
            self._returned.extend(freed)
            large: Any = () if block is None else self._theirs.lend(*block)
            if message[0] in ("execute", "load", "complete", "close"):
                self._work.put(self._on_work(message, large))
            else:
                self._on_message(message, large)


class Awaited(Future[Any]):
    """An answer of the service, to a call of a model or not; the thread that waits for it reads the pipe."""

    def __init__(self, end: ChildEnd, on_cancel: Callable[[], None], *, is_call: bool) -> None:
        super().__init__()
        self._end = end
        self._on_cancel = on_cancel
        self.is_call = is_call

    def cancel(self) -> bool:
        """As ever."""
        is_new = not self.done()
        is_cancelled = super().cancel()
        if is_new and is_cancelled:
            self._on_cancel()
        return is_cancelled

    def result(self, timeout: float | None = None) -> Any:
        """As ever."""
        self._end.wait_for(self)
        return super().result(timeout)

    def add_done_callback(self, callback: Callable[["Future[Any]"], object]) -> None:
        """As ever; the thread that waits for this need not be one that reads."""
        self._end.read_aside()
        super().add_done_callback(callback)
