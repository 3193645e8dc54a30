"""``Dispatcher``: from a model version's queue through batches and instances to the answers."""

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

from weft.base.errors import UnavailableError
from weft.base.observing import telemetry
from weft.base.observing.logs import get_logger
from weft.base.statistics import ModelStatistics
from weft.serving.backends.base import Backend, InstanceContext, ModelContext
from weft.serving.queues import QUEUES
from weft.serving.queues.queue import RequestQueue, Waiting
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, num_to_hold
from weft.serving.request.request import InferenceRequest
from weft.serving.runtime.answers import Answers
from weft.serving.runtime.execution import BackgroundThread, BatchExecution
from weft.serving.runtime.idle import CrashedInstances, IdleInstances, idle_instances
from weft.serving.runtime.instance import Instance, Lane
from weft.serving.runtime.recorder import LIMIT_NS, Recorder, record_execution
from weft.serving.runtime.remote import RemoteInstance
from weft.serving.scheduler.admission import ExecutionTimes
from weft.serving.scheduler.batcher import Batcher, SlotBatcher, holding, make_batcher
from weft.serving.scheduler.rate_limiter import RateLimiter

_CLOCK_MONOTONIC = 1
_TFD_TIMER_ABSTIME = 1
_NS_PER_S = 1_000_000_000


class _TimerSpec(ctypes.Structure):
    """``struct itimerspec`` of timerfd_settime(2): interval, then first expiration; seconds and nanoseconds each."""

    _fields_ = (
        ("interval_s", ctypes.c_long),
        ("interval_ns", ctypes.c_long),
        ("value_s", ctypes.c_long),
        ("value_ns", ctypes.c_long),
    )


class Alarm:
    """Calls back on the running event loop at the earliest time set since the last callback."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop = loop
        self._callback = callback
        self._at_ns: int | None = None
        self._handle: asyncio.TimerHandle | None = None
        self._spec = _TimerSpec()
        self._fd = -1
        if sys.platform == "linux":
            self._libc = ctypes.CDLL(None)
            self._fd = self._libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd >= 0:
            loop.add_reader(self._fd, self._ring)

    def set(self, at_ns: int, now_ns: int) -> None:
        """Call back at ``at_ns`` (``time.monotonic_ns``) or earlier: cheaper than a timer for every request."""
        if self._at_ns is not None and self._at_ns <= at_ns:
            return
        self._at_ns = at_ns
        if self._fd >= 0:
            self._spec.value_s, self._spec.value_ns = divmod(max(at_ns, 1), _NS_PER_S)
            self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(self._spec), None)
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_later(max(at_ns - now_ns, 0) / _NS_PER_S, self._ring)

    def close(self) -> None:
        """Cancel the timer. May be called again."""
        if self._handle is not None:
            self._handle.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1

    def _ring(self) -> None:
        if self._fd >= 0:
            with suppress(BlockingIOError):  # it was set again after the loop saw it
                os.read(self._fd, 8)
        self._at_ns = self._handle = None
        self._callback()


_LOG = get_logger("weft.serving")

#: Least time that backends get to close.
_MIN_CLOSE_S = 5.0
#: Batches that wait in the pipe to the process of a model's only instance, where that is their order anyway: with none
#: the process and the event loop wait for one another. CPU of service and process for an echo of 64 bytes, 32 at once,
#: 2 busy cores of an AMD EPYC: 81 and 58 us with none, 53 and 40 with 3, 44 and 34 with 7, 42 and 32 with 15.
NUM_AHEAD = 7
#: Time for the system to end a process that was killed.
_ABORT_WAIT_S = 1.0


class Dispatcher:
    """Forms batches of queued requests, runs them on instances, and answers the requests.

    Every method is called on one event loop. Model code runs on the threads of the instances or in their processes;
    inline instances run in ``dispatch``, one batch in each loop iteration. While it is not ``is_open``, batches are
    formed without delay. If ``is_due``, ``dispatch`` runs again in this loop iteration.
    """

    def __init__(
        self,
        context: ModelContext,
        backend: type[Backend],
        settings: SchedulerSettings,
        places: Sequence[InstanceContext],
        statistics: ModelStatistics,
        limiter: RateLimiter | None,
    ) -> None:
        self.signature = signature = context.signature
        self._settings = settings
        self.statistics = statistics
        limit_s = settings.execution_timeout_us / 1e6
        self.num_slots = backend.num_slots(context)
        is_limited = any(place.is_inline or place.rate_limit is not None for place in places)
        is_apart = not (is_limited or self.num_slots or signature.is_decoupled or num_to_hold())
        self._background_level = settings.background_level if is_apart else 0
        has_background = self._background_level > 0
        can_overlap = not (is_limited or self.num_slots or signature.is_decoupled or settings.sequences)
        make_instance = RemoteInstance if backend.is_remote(context) else Instance
        self._instances = [
            make_instance(
                context,
                backend,
                place,
                self._on_executed,
                self._on_crash,
                limit_s,
                settings.load_timeout_s,
                has_background=has_background,
                can_overlap=can_overlap,
                num_ahead=NUM_AHEAD if can_overlap and len(places) == 1 and settings.is_plain else 0,
            )
            for place in places
        ]
        self.loop = asyncio.get_running_loop()
        self.queue = self._make_queue()
        lanes: Sequence[Lane] = self._instances
        self._idle = idle_instances(limiter, lanes, places, lambda: self.queue, self.dispatch)
        self._slots = SlotBatcher(self.queue, self.num_slots, self._idle) if self.num_slots else None
        self._batcher = self._make_batcher(context.layout.buckets)
        self._background: IdleInstances[BackgroundThread] = IdleInstances()
        #: Who is idle, and the requests that wait for them.
        self._lines: list[tuple[IdleInstances[Any], Waiting]] = [(self._idle, self.queue)]
        self._running: dict[Lane | BackgroundThread, Sequence[InferenceRequest]] = {}
        self._is_inline = any(place.is_inline for place in places)
        self.recorder = Recorder(statistics, is_inline=self._is_inline)
        self.answers = Answers(
            signature,
            self.recorder,
            is_ordered=settings.preserve_ordering,
            drop=self._drop,
            on_end=self._on_stream_end,
            checks_outputs=backend.checks_outputs,
        )
        self.crashed = CrashedInstances(signature.name, len(places))
        num_at_once = len(places) * max(self.num_slots, 1)
        self.times = ExecutionTimes(settings, len(places), num_at_once)
        self.is_open = self.is_due = False
        self._alarm: Alarm | None = None
        self._drained = asyncio.Event()
        statistics.count_pending_by_level = self.queue.num_by_level
        statistics.occupancy = self._occupancy

    def _make_queue(self) -> RequestQueue:
        return QUEUES[self._settings.queue_policy](self._settings)

    def _make_batcher(self, buckets: LengthBuckets | None) -> Batcher:
        if self._slots is not None:
            return holding(self._slots, num_to_hold())
        return make_batcher(self._settings, buckets, num_to_hold=num_to_hold())

    async def start(self) -> None:
        """Load every instance, one after another, and open the model; or close them again and raise a WeftError."""
        self._alarm = Alarm(asyncio.get_running_loop(), self.dispatch)
        try:
            self._idle.open()
            for instance in self._instances:
                await instance.load()
        except BaseException:
            await self._close(_MIN_CLOSE_S)
            raise
        of_each = zip_longest(*(instance.lanes for instance in self._instances))
        self._idle.extend([lane for lanes in of_each for lane in lanes if lane is not None])
        self._open_background()
        self.is_open = True

    def _open_background(self) -> None:
        background = [instance.background for instance in self._instances if instance.background is not None]
        if len(background) == len(self._instances):
            better, lowest = self.queue.apart(self._background_level)
            self._background.extend(background)
            self._lines = [(self._idle, better), (self._background, lowest)]

    async def stop(self, *, grace_s: float) -> None:
        """Answer the accepted requests within ``grace_s``, the rest with UnavailableError; close the backends."""
        self.is_open = False
        end_s = time.monotonic() + grace_s
        self.dispatch()
        if not self._drained.is_set():
            try:
                async with asyncio.timeout(grace_s):
                    await self._drained.wait()
            except TimeoutError:
                self._abandon()
        await self._close(max(end_s - time.monotonic(), _MIN_CLOSE_S))

    def _not_ready(self) -> UnavailableError:
        """Error for a request that the model does not accept, or did not answer before it stopped."""
        return UnavailableError(
            f"model '{self.signature.name}' version {self.signature.version} is not at ready state: it is loading or "
            "being unloaded; try again later"
        )

    def _request_added(self, now_ns: int) -> None:
        """Schedule a dispatch for a request added to the queue, at the best moment."""
        if not (self._idle or self._background):
            self._wake_at(self.queue.next_expiry_ns(), now_ns)
        elif not self._settings.is_batching:
            self.dispatch()
        else:
            self._dispatch_soon()  # requests that arrive in the same turn of the loop may share a batch

    def _dispatch_soon(self) -> None:
        """Call ``dispatch`` once, at the end of the event loop's current iteration."""
        if not self.is_due:
            self.is_due = True
            self.loop.call_soon(self.dispatch)

    def dispatch(self) -> None:
        """Answer expired requests, give idle instances work, and set the alarm for the next event."""
        self.is_due = False
        queue, now_ns = self.queue, time.monotonic_ns()
        expiry_ns = queue.next_expiry_ns()
        if expiry_ns is not None and expiry_ns <= now_ns:
            for request, error in queue.expire(now_ns):
                self.answers.fail(request, error, now_ns)
        for idle, waiting in self._lines:
            wake_ns = None
            while idle and queue.num_waiting:
                requests, wake_ns, wanted = self._batcher.next_batch(waiting, now_ns, may_wait=self.is_open)
                if not requests:
                    break
                queue.take(requests, now_ns)
                instance = idle.take(wanted)
                if self._slots is not None:
                    self._slots.enter(requests, instance)
                self._running[instance] = requests
                instance.execute(requests)
                if self._is_inline:
                    break  # it has executed; where more is waiting, others get a turn of the event loop first
            if wake_ns is not None:
                self._wake_at(wake_ns, now_ns)
        if expiry_ns is not None:
            self._wake_at(queue.next_expiry_ns(), now_ns)
        if not self.is_open:
            self._check_drained()

    def _drop(self, request: InferenceRequest) -> None:
        """Remove the request of a caller that left from the queue, or flag it if it runs."""
        request.cancel()
        self.queue.remove(request)

    def _wake_at(self, at_ns: int | None, now_ns: int) -> None:
        if at_ns is not None and self._alarm is not None:
            self._alarm.set(at_ns, now_ns)

    def _on_executed(self, instance: Lane | BackgroundThread, execution: BatchExecution) -> None:
        del self._running[instance]
        if isinstance(instance, Lane):
            self._idle.give_back(instance, is_lost=instance.owner in self.crashed.reasons)
        else:
            self._background.append(instance)
        if not self._is_inline:
            self.dispatch()
        elif self.queue.num_waiting or not self.is_open:
            self._dispatch_soon()
        requests = execution.requests
        if not requests:
            return
        duration_ns = execution.end_ns - execution.start_ns
        if self._is_inline and duration_ns > LIMIT_NS:
            self.recorder.overran(duration_ns, execution.end_ns)
        if self._slots is None:  # else the requests still run
            self.times.measured(len(requests), duration_ns)
        if execution.num_rows:
            self.recorder.executed(execution)
        if not execution.has_failed and isinstance(instance, Lane):  # in the background they wait for others
            self.times.add(execution.num_rows, duration_ns, execution.end_ns)
        self.answers.deliver(execution)
        if telemetry.is_enabled():
            record_execution(self.signature.name, instance.name, execution, is_decoupled=self.signature.is_decoupled)

    def _on_stream_end(self, request: InferenceRequest) -> None:
        if self._slots is not None and self._slots.leave(request):
            self.times.measured(1, time.monotonic_ns() - request.start_ns)
            self._dispatch_soon()
        self._check_drained()

    def _on_crash(self, instance: Instance, reason: str) -> None:
        if not reason:
            self.crashed.remove(instance)
            self.statistics.restart_count += not instance.is_hung  # else it was never loaded again
            self._idle.extend([lane for lane in instance.lanes if lane not in self._running])
            self.dispatch()
            return
        self.crashed.add(instance, reason, is_hung=instance.is_hung, is_loading=instance.is_slow)
        for lane in instance.lanes:
            self._idle.discard(lane)
        if self.crashed.includes_all:
            for request in list(self.queue):
                self.answers.withdraw(request, self.crashed.error())
            self._check_drained()

    def _abandon(self) -> None:
        now_ns = time.monotonic_ns()
        running = [request for requests in self._running.values() for request in requests]
        for request in [*self.queue, *running, *self.answers.unfinished]:
            self._drop(request)
            if request.answer is not None and not request.answer.done():
                self.answers.fail(request, self._not_ready(), now_ns)

    def _check_drained(self) -> None:
        if not (self.is_open or self._running or self.queue.num_waiting or self.answers.unfinished):
            self._drained.set()

    async def _close(self, grace_s: float) -> None:
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        self._idle.close()
        closing = [(instance, instance.close()) for instance in self._instances]
        busy = {lane.owner for lane in self._running if isinstance(lane, Lane)}
        idle = [closed for instance, closed in closing if instance not in busy and not instance.is_loading]
        if idle:
            await asyncio.wait(idle, timeout=grace_s)
        for instance, closed in closing:
            if not closed.done():
                _LOG.warning("instance %s still runs; it closes when its model returns", instance.name)
                instance.abort()
        aborted = [closed for instance, closed in closing if isinstance(instance, RemoteInstance)]
        if aborted:
            await asyncio.wait(aborted, timeout=_ABORT_WAIT_S)

    def _occupancy(self) -> float:
        num_instances, num_waiting = len(self._instances), self.queue.num_waiting
        if self._slots is not None:
            return (len(self._slots) + num_waiting) / (num_instances * self.num_slots)
        num_rows = num_instances * max(self._settings.max_batch_size, 1)
        num_lanes = sum(instance.num_at_once for instance in self._instances)
        return min(len(self._running) / num_lanes, 1.0) + num_waiting / num_rows
