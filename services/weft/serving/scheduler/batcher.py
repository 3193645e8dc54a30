"""Batchers: which requests form the next batch, or how long to wait for more; policy only, the queue is not changed.

Results are those of Triton Inference Server's dynamic batcher. A batch is a prefix of the order of service: no request
is overtaken by a later one; with length buckets, a prefix of its bucket. Stateful sequences have batchers of their own,
and so have backends that process several requests concurrently.
"""

from collections.abc import Hashable, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, Protocol

from weft.serving.queues.queue import RequestQueue, Waiting
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest

#: Requests considered for the batch of one bucket, so that a long queue does not delay the instances.
_MAX_LOOKAHEAD = 1024
#: Requests that one instance gets at once, so that a long run of them cannot hold up a better one.
_MAX_AT_ONCE = 16


class BatchDecision(NamedTuple):
    """``requests`` for an ``instance`` (None: any); if empty, ask again at ``wait_until_ns`` or on an arrival."""

    requests: list[InferenceRequest]
    wait_until_ns: int | None = None
    instance: Hashable = None


class Batcher(Protocol):
    """Decides what an idle instance executes."""

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        """The decision at ``now_ns``; with ``may_wait=False`` no request is delayed to fill a batch."""


class _SingleBatcher:
    """Executes each request alone, in queue order: models without ``dynamic_batching``."""

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        for request in queue:
            return BatchDecision([request])
        return BatchDecision([])


class _DynamicBatcher:
    """Collects a batch until it is full, has a preferred size, cannot grow, or a member has waited long enough."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self._max_rows = max(settings.max_batch_size, 1)
        self._preferred = frozenset(settings.preferred_batch_sizes or (self._max_rows,))
        self._max_preferred = max(self._preferred)
        self._has_delay = settings.max_queue_delay_us > 0

    def next_batch(
        self, queue: Waiting, now_ns: int, *, may_wait: bool = True, max_rows: int | None = None
    ) -> BatchDecision:
        if not self._has_delay and len(queue) == 1:
            return BatchDecision(list(iter(queue)))  # without asking for its length again
        batch, num_best, send_by_ns, is_closed = self._collect(queue, self._max_rows if max_rows is None else max_rows)
        if not batch:
            return BatchDecision([])
        is_late = not may_wait or (self._has_delay and send_by_ns <= now_ns)
        if num_best and not is_late:
            return BatchDecision(batch[:num_best])
        if is_closed or is_late or not self._has_delay:
            return BatchDecision(batch)
        return BatchDecision([], send_by_ns)

    def _collect(
        self, queue: Iterable[InferenceRequest], max_rows: int
    ) -> tuple[list[InferenceRequest], int, int, bool]:
        """The longest batch, its best prefix (0 = none), how long it may wait, and whether it cannot grow."""
        batch: list[InferenceRequest] = []
        num_rows = num_best = send_by_ns = 0
        batch_key: object = None
        for request in queue:
            grown = num_rows + request.num_rows
            if not batch:
                send_by_ns = request.send_by_ns
                batch_key = request.batch_key
            else:
                if grown > self._max_preferred and not num_best:
                    num_best = len(batch)
                if grown > max_rows or request.batch_key != batch_key:
                    return batch, num_best, send_by_ns, True
                send_by_ns = min(send_by_ns, request.send_by_ns)
            batch.append(request)
            num_rows = grown
            if num_rows in self._preferred:
                num_best = len(batch)
        return batch, num_best, send_by_ns, num_rows >= min(self._max_preferred, max_rows)


class _BucketBatcher:
    """Forms batches per length bucket; the bucket whose first request is first in the queue has precedence.

    A full batch does not wait for another bucket that still collects.
    """

    def __init__(self, settings: SchedulerSettings, buckets: LengthBuckets) -> None:
        self._max_rows = max(settings.max_batch_size, 1)
        self._buckets = buckets
        self._dynamic = _DynamicBatcher(settings)

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        waiting = _by_key(islice(queue, _MAX_LOOKAHEAD))
        return _first(
            self._dynamic.next_batch(
                requests, now_ns, may_wait=may_wait, max_rows=self._buckets.max_rows(key, self._max_rows)
            )
            for key, requests in waiting.items()
        )


class _SequenceBatcher:
    """Chooses the first of the ``idle`` instances whose sequences have a batch.

    A batch has at most one request of a sequence. With the strategy "direct" each is in the row of its sequence, and
    the backend fills the other rows; with "oldest" requests that may share a batch do as with ``dynamic_batching``.
    """

    def __init__(self, sequences: SequenceQueue, settings: SchedulerSettings, idle: Iterable[Hashable]) -> None:
        self._sequences = sequences
        self._idle = idle
        self._dynamic = _DynamicBatcher(settings)
        own = settings.sequences or SequenceSettings(is_direct=False)
        self._is_direct = own.is_direct
        self._num_wanted = own.minimum_slot_utilization * own.num_slots if own.max_queue_delay_us > 0 else 0.0

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        return _first(self._decisions(now_ns, may_wait))

    def _decisions(self, now_ns: int, may_wait: bool) -> Iterator[BatchDecision]:
        for instance in self._idle:
            for batch in _by_key(self._sequences.heads(instance)).values():
                if not self._is_direct:
                    yield self._dynamic.next_batch(batch, now_ns, may_wait=may_wait)._replace(instance=instance)
                elif may_wait and len(batch) < self._num_wanted and now_ns < batch[0].send_by_ns:
                    yield BatchDecision([], batch[0].send_by_ns)
                    break  # its rows are those of the oldest request's batch
                else:
                    yield BatchDecision(batch, instance=instance)


def _by_key(requests: Iterable[InferenceRequest]) -> dict[object, list[InferenceRequest]]:
    alike: dict[object, list[InferenceRequest]] = {}
    for request in requests:
        alike.setdefault(request.batch_key, []).append(request)
    return alike


def _first(decisions: Iterable[BatchDecision]) -> BatchDecision:
    """The first with a batch; else no batch now, and the first time at which one may change."""
    times: list[int] = []
    for decision in decisions:
        if decision.requests:
            return decision
        if decision.wait_until_ns is not None:
            times.append(decision.wait_until_ns)
    return BatchDecision([], min(times, default=None))


class _HoldingBatcher:
    """Forms no batch until that many requests are queued for the first time; for tests."""

    def __init__(self, batcher: Batcher, num_to_hold: int) -> None:
        self._batcher = batcher
        self._num_to_hold = num_to_hold

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        if may_wait and len(queue) < self._num_to_hold:
            return BatchDecision([])
        self._num_to_hold = 0
        return self._batcher.next_batch(queue, now_ns, may_wait=may_wait)


def holding(batcher: Batcher, num_to_hold: int) -> Batcher:
    """Delay the first batch of a batcher until ``num_to_hold`` requests are queued; 0: do not."""
    return _HoldingBatcher(batcher, num_to_hold) if num_to_hold else batcher


def make_batcher(settings: SchedulerSettings, buckets: LengthBuckets | None = None, *, num_to_hold: int = 0) -> Batcher:
    """The batcher for a model's settings."""
    if not settings.is_batching:
        return _SingleBatcher()
    return holding(_DynamicBatcher(settings) if buckets is None else _BucketBatcher(settings, buckets), num_to_hold)


def make_sequence_batcher(
    sequences: SequenceQueue, settings: SchedulerSettings, idle: Iterable[Hashable], *, num_to_hold: int = 0
) -> Batcher:
    """The batcher for a model with stateful sequences."""
    return holding(_SequenceBatcher(sequences, settings, idle), num_to_hold)


class SlotBatcher:
    """Hands out the head of the queue as soon as its instance has a slot for it.

    A request has its slot from when it is handed out until it is answered. Another may enter an instance while fewer
    than ``num_slots`` of the requests there are at least as good as it. So one that is strictly better
    (``RequestQueue.overtakes``) enters a full instance at once, if the backend can preempt others, and an instance
    never has more than ``num_slots`` requests of one level.
    """

    def __init__(self, queue: RequestQueue, num_slots: int, idle: Iterable[Hashable]) -> None:
        self._num_slots = num_slots
        self._overtakes = queue.overtakes
        self._idle = idle
        self._members: dict[Hashable, set[InferenceRequest]] = {}
        self._instance_of: dict[InferenceRequest, Hashable] = {}

    def __len__(self) -> int:
        """Number of slots in use."""
        return len(self._instance_of)

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        """Requests for the idle instance that has the fewest; none if none may enter."""
        instance = min(self._idle, key=self._num_members, default=None)
        if instance is None:
            return BatchDecision([])
        entering: list[InferenceRequest] = []
        # One at a time where there are several instances, so that they share what came together.
        for request in islice(queue, _MAX_AT_ONCE if len(self._members) < 2 else 1):
            if not self._may_enter(request, instance, len(entering)):
                break
            entering.append(request)
        return BatchDecision(entering, instance=instance)

    def enter(self, requests: Iterable[InferenceRequest], instance: Hashable) -> None:
        """Give the requests slots of the instance."""
        members = self._members.setdefault(instance, set())
        for request in requests:
            members.add(request)
            self._instance_of[request] = instance

    def leave(self, request: InferenceRequest) -> bool:
        """Free the slot of a request; return whether it had one."""
        instance = self._instance_of.pop(request, None)
        if instance is None:
            return False
        self._members[instance].discard(request)
        return True

    def _num_members(self, instance: Hashable) -> int:
        return len(self._members.setdefault(instance, set()))

    def _may_enter(self, request: InferenceRequest, instance: Hashable, num_entering: int) -> bool:
        members = self._members[instance]
        num_left = self._num_slots - num_entering  # those that enter with it come first in the order of service
        if len(members) < num_left:
            return True
        return num_left > sum(not self._overtakes(request, other) for other in members)
