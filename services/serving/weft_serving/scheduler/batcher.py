"""Which requests form the next batch, or until when to wait for more: policy only, the queue is read and not changed.

The outcomes are those of Triton Inference Server's dynamic batcher. A batch is a prefix of the order of service: no
request is overtaken by a later one of its level.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from weft_common.signature import ModelSignature
from weft_common.tensors import WireTensor
from weft_serving.request import InferenceRequest
from weft_serving.scheduler.queue import PriorityQueue
from weft_serving.scheduler.settings import SchedulerSettings


class Decision(NamedTuple):
    """What to do with a free instance.

    Attributes:
        requests: Execute these now, in this order; empty: nothing now.
        wait_until_ns: If ``requests`` is empty: ask again at this time; None: ask again when a request arrives.
    """

    requests: list[InferenceRequest]
    wait_until_ns: int | None = None


class Batcher(Protocol):
    """Decides what a free instance executes."""

    def next_batch(self, queue: PriorityQueue, now_ns: int, *, may_wait: bool = True) -> Decision:
        """What to do at ``now_ns``; with ``may_wait=False`` waiting requests are never held back for others."""


class SingleBatcher:
    """Each request is executed alone, in the order of service: models without ``dynamic_batching``."""

    def next_batch(self, queue: PriorityQueue, now_ns: int, *, may_wait: bool = True) -> Decision:
        """The first request, or nothing."""
        for request in queue:
            return Decision([request])
        return Decision([])


class DynamicBatcher:
    """Collects a batch until it is full, has a preferred size, cannot grow, or its oldest member waited long enough.

    Args:
        settings: ``dynamic_batching`` of the model.
        num_to_hold: Nothing is formed until this many requests are queued for the first time; for tests.
    """

    def __init__(self, settings: SchedulerSettings, *, num_to_hold: int = 0) -> None:
        self._max_rows = max(settings.max_batch_size, 1)
        self._preferred = frozenset(settings.preferred_batch_sizes or (self._max_rows,))
        self._max_preferred = max(self._preferred)
        self._delay_ns = settings.max_queue_delay_us * 1000
        self._num_to_hold = num_to_hold

    def next_batch(self, queue: PriorityQueue, now_ns: int, *, may_wait: bool = True) -> Decision:
        """The next batch; or nothing, and when the oldest request that could be in it has waited long enough."""
        if self._num_to_hold:
            if may_wait and len(queue) < self._num_to_hold:
                return Decision([])
            self._num_to_hold = 0
        batch, num_best, oldest_ns, is_closed = self._collect(queue)
        if not batch:
            return Decision([])
        is_late = not may_wait or 0 < self._delay_ns <= now_ns - oldest_ns
        if num_best and not is_late:
            return Decision(batch[:num_best])
        if is_closed or is_late or not self._delay_ns:
            return Decision(batch)
        return Decision([], oldest_ns + self._delay_ns)

    def _collect(self, queue: PriorityQueue) -> tuple[list[InferenceRequest], int, int, bool]:
        """The longest batch, its best prefix (0 = none), arrival of its oldest member, and whether it cannot grow."""
        batch: list[InferenceRequest] = []
        num_rows = num_best = oldest_ns = 0
        batch_key: object = None
        for request in queue:
            grown = num_rows + request.num_rows
            if not batch:
                oldest_ns = request.enqueue_ns
                batch_key = request.batch_key
            else:
                if grown > self._max_preferred and not num_best:
                    num_best = len(batch)
                if grown > self._max_rows or request.batch_key != batch_key:
                    return batch, num_best, oldest_ns, True
                oldest_ns = min(oldest_ns, request.enqueue_ns)
            batch.append(request)
            num_rows = grown
            if num_rows in self._preferred:
                num_best = len(batch)
        return batch, num_best, oldest_ns, num_rows >= self._max_preferred


def make_batcher(settings: SchedulerSettings, *, num_to_hold: int = 0) -> Batcher:
    """The batcher that a model's settings ask for."""
    return DynamicBatcher(settings, num_to_hold=num_to_hold) if settings.is_batching else SingleBatcher()


def varying_inputs(signature: ModelSignature) -> tuple[str, ...]:
    """Inputs in which two requests of a batching model can differ in shape or presence; () where no two can."""
    if signature.max_batch_size == 0:
        return ()
    return tuple(spec.name for spec in signature.inputs if spec.is_optional or -1 in spec.dims)


def batch_key(inputs: Mapping[str, WireTensor], names: tuple[str, ...]) -> object:
    """What requests of one batch have in common: row shapes of the inputs ``names``, None where one is absent."""
    return tuple([tensor.shape[1:] if (tensor := inputs.get(name)) is not None else None for name in names])
