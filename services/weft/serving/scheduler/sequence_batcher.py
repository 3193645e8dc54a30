"""Which requests of stateful sequences form the next batch of an instance: policy only."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence

from weft.serving.queues.queue import Waiting
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.sequence_settings import SequenceSettings
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import BatchDecision, Batcher, DynamicBatcher, holding


class SequenceBatcher(ABC):
    """Chooses the first idle instance whose sequences have a batch; a batch has at most one request of a sequence.

    Args:
        sequences: The queue of the model.
        idle: Idle instances, in the order of preference.
    """

    def __init__(self, sequences: SequenceQueue, idle: Iterable[Hashable]) -> None:
        self._sequences = sequences
        self._idle = idle

    def next_batch(self, queue: Waiting, now_ns: int, *, may_wait: bool = True) -> BatchDecision:
        """The next batch and its instance; or nothing, and until when requests may be held back."""
        undecided: list[BatchDecision] = []
        for instance in self._idle:
            heads = self._sequences.heads(instance)
            if not heads:
                continue
            decision = self._choose(heads, now_ns, may_wait)
            if decision.requests:
                return decision._replace(instance=instance)
            undecided.append(decision)
        return _earliest(undecided)

    @abstractmethod
    def _choose(self, heads: Sequence[InferenceRequest], now_ns: int, may_wait: bool) -> BatchDecision:
        """The batch of one instance, whose ``heads`` are at least one."""


class DirectBatcher(SequenceBatcher):
    """Keeps each request in the row of its sequence; the backend fills the other rows."""

    def __init__(self, sequences: SequenceQueue, settings: SequenceSettings, idle: Iterable[Hashable]) -> None:
        super().__init__(sequences, idle)
        self._has_delay = settings.max_queue_delay_us > 0 and settings.minimum_slot_utilization > 0
        self._num_wanted = settings.minimum_slot_utilization * settings.num_slots

    def _choose(self, heads: Sequence[InferenceRequest], now_ns: int, may_wait: bool) -> BatchDecision:
        """Every head that may be in one batch with the oldest."""
        batch_key = heads[0].batch_key
        batch = [head for head in heads if head.batch_key == batch_key]
        if self._has_delay and may_wait and len(batch) < self._num_wanted and now_ns < batch[0].send_by_ns:
            return BatchDecision([], batch[0].send_by_ns)
        return BatchDecision(batch)


class OldestBatcher(SequenceBatcher):
    """Batches the oldest requests that may share a batch, as ``dynamic_batching`` does."""

    def __init__(self, sequences: SequenceQueue, settings: SchedulerSettings, idle: Iterable[Hashable]) -> None:
        super().__init__(sequences, idle)
        self._dynamic = DynamicBatcher(settings)

    def _choose(self, heads: Sequence[InferenceRequest], now_ns: int, may_wait: bool) -> BatchDecision:
        alike: dict[object, list[InferenceRequest]] = {}
        for head in heads:
            alike.setdefault(head.batch_key, []).append(head)
        decisions = [self._dynamic.next_batch(group, now_ns, may_wait=may_wait) for group in alike.values()]
        return next((decision for decision in decisions if decision.requests), _earliest(decisions))


def _earliest(decisions: Iterable[BatchDecision]) -> BatchDecision:
    """No batch now; ask again at the first time at which one of the decisions may change."""
    times = [decision.wait_until_ns for decision in decisions if decision.wait_until_ns is not None]
    return BatchDecision([], min(times, default=None))


def make_sequence_batcher(
    sequences: SequenceQueue, settings: SchedulerSettings, idle: Iterable[Hashable], *, num_to_hold: int = 0
) -> Batcher:
    """The batcher that the settings of a model with stateful sequences ask for."""
    if settings.sequences is not None and settings.sequences.is_direct:
        return holding(DirectBatcher(sequences, settings.sequences, idle), num_to_hold)
    return holding(OldestBatcher(sequences, settings, idle), num_to_hold)
