"""Processes large bodies in separate processes.

Python parses JSON under the GIL, so on a thread of this process it would stall every stream. The memory that the work
leaves behind is freed with its process, which ends after some time without work.
"""

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import ParamSpec, TypeVar

from weft.base.errors import ResourceExhaustedError


class FairSlots:
    """Like a semaphore, but free slots go to the clients that wait in turn; owned by the event loop."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._waiting = OrderedDict[Hashable, deque[asyncio.Future[None]]]()  # the client whose turn is next first

    async def take(self, client: Hashable) -> None:
        """Wait for a slot, and hold it until ``give_back``. Cancelling the awaiting task releases it."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it got the slot in the same moment
                self.give_back()
            raise

    def give_back(self) -> None:
        """Release a slot to the next client."""
        while self._waiting:
            client, turns = self._waiting.popitem(last=False)
            while turns:
                turn = turns.popleft()
                if not turn.done():  # else its task was cancelled
                    turn.set_result(None)
                    if turns:
                        self._waiting[client] = turns  # behind the others
                    return
        self._num_free += 1


P = ParamSpec("P")
R = TypeVar("R")

#: Processes at once; each may need some hundred MiB for a body of the largest size.
MAX_PROCESSES = 2
#: A process without work ends after so many seconds.
IDLE_S = 30.0
_PR_SET_PDEATHSIG = 1


class Offload:
    """Runs functions in processes that are started on demand; create it on the event loop that uses it."""

    def __init__(self, idle_s: float = IDLE_S) -> None:
        self._idle_s = idle_s
        self._pool: ProcessPoolExecutor | None = None
        self._num_running = 0
        self._slots = FairSlots(MAX_PROCESSES)  # what waits can be cancelled, and is in no queue of the pool
        self._idle_timer: asyncio.TimerHandle | None = None

    async def run(self, client: Hashable, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a module-level function and return its result; arguments, result and errors are pickled.

        Clients take turns, however much each wants. The work continues if the awaiting task is cancelled, and its
        result is dropped. Raises ResourceExhaustedError: the process died, as it does without enough memory.
        """
        await self._slots.take(client)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                MAX_PROCESSES,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_prepare,
                initargs=(os.getpid(),),
            )
        pool = self._pool
        loop = asyncio.get_running_loop()
        self._num_running += 1
        try:
            running = pool.submit(work, *args, **kwargs)
            running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended))
        except BaseException as error:
            self._ended()
            if isinstance(error, BrokenProcessPool):
                raise self._broken(pool) from error
            raise
        try:
            return await asyncio.wrap_future(running)
        except BrokenProcessPool as error:
            raise self._broken(pool) from error
        finally:
            del running  # it holds the error that is raised, whose traceback holds this frame, and with it the body

    def close(self) -> None:
        """Stop the processes and their work."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._pool is not None:
            for process in multiprocessing.active_children():
                process.kill()
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _ended(self) -> None:
        self._slots.give_back()
        self._num_running -= 1
        if not self._num_running:
            self._idle_timer = asyncio.get_running_loop().call_later(self._idle_s, self._end_idle)

    def _end_idle(self) -> None:
        if self._pool is not None and not self._num_running:
            self._pool.shutdown(wait=False)
            self._pool = None

    def _broken(self, pool: ProcessPoolExecutor) -> ResourceExhaustedError:
        if self._pool is pool:
            self._pool = None
        return ResourceExhaustedError("the body took more memory than there is, or its parsing was ended; send less")


def _prepare(parent: int) -> None:
    """Initialise a worker process: end with the gateway, ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
