"""A loaded model version whose requests belong to sequences."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft_common.core import InferCall
from weft_common.errors import UnavailableError
from weft_common.statistics import ModelStatistics
from weft_serving.backends.base import Backend, InstanceContext, ModelContext
from weft_serving.request.request import InferenceRequest
from weft_serving.scheduler.rate_limiter import RateLimiter
from weft_serving.scheduler.sequence import SequenceQueue
from weft_serving.scheduler.sequence_batcher import make_sequence_batcher
from weft_serving.scheduler.settings import SchedulerSettings, num_to_hold
from weft_serving.served.instance import Execution, Instance
from weft_serving.served.model import ServedModel


class SequenceModel(ServedModel):
    """Runs the requests of a sequence one after another on one instance.

    A sequence ends when one of its requests is withdrawn, whether that waits or runs, and when its instance is lost;
    its other requests then fail, and what comes later must start it again. Arguments and errors are those of
    ``ServedModel``.

    Attributes:
        on_free: Called when the last sequence has ended.
    """

    def __init__(
        self,
        context: ModelContext,
        backend: type[Backend],
        settings: SchedulerSettings,
        instances: Sequence[InstanceContext],
        statistics: ModelStatistics | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        super().__init__(context, backend, settings, instances, statistics, limiter)
        self._queue = self._sequences = SequenceQueue(settings, self.signature.name, self._instances)
        self.statistics.count_pending_by_level = self._sequences.num_by_level
        self._batcher = make_sequence_batcher(self._sequences, settings, self._idle, num_to_hold=num_to_hold())
        self._all_over = asyncio.Event()
        self._is_iterative = settings.sequences is not None and settings.sequences.is_iterative
        self._had_sequences = False
        self.on_free: Callable[[], None] = lambda: None

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence has started and not ended; it may have no request here just now."""
        return self._sequences.num_sequences > 0

    def continues(self, call: InferCall) -> bool:
        """Whether the call is one of a sequence that has started here and goes on."""
        parameters = call.parameters
        return (
            self._is_accepting
            and not self._is_iterative
            and parameters.get("sequence_id") in self._sequences
            and not parameters.get("sequence_start")
        )

    async def stop(self, *, grace_s: float) -> None:
        """As ``ServedModel.stop``; sequences that have started go on within the grace, and no other starts."""
        end_s = time.monotonic() + grace_s
        self._sequences.is_closing = True
        if self._is_accepting and self._sequences.num_sequences:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_over.wait(), grace_s)
        await super().stop(grace_s=max(end_s - time.monotonic(), 0.0))

    def expect_no_more(self) -> None:
        """Nobody can send requests any more: a stop does not wait for sequences that have started."""
        self._all_over.set()

    def _dispatch(self) -> None:
        super()._dispatch()
        if self.has_sequences:
            self._had_sequences = True
            return
        if self._sequences.is_closing:
            self._all_over.set()
        if self._had_sequences:
            self._had_sequences = False
            self.on_free()

    def _on_executed(self, instance: Instance, execution: Execution) -> None:
        again = {
            request
            for request, answer in zip(execution.requests, execution.answers, strict=True)
            if answer is None and request.answer is not None and not request.answer.done()
        }
        self._sequences.executed(self._running[instance], time.monotonic_ns(), again)
        super()._on_executed(instance, execution)

    def _on_outage(self, instance: Instance, reason: str) -> None:
        if reason:
            running = self._running.get(instance, ())
            self._sequences.lose(instance)
            for request in running:  # what it left behind is lost too, so that another try would begin in the middle
                if request.answer is not None and not request.answer.done():
                    self._withdraw(request, UnavailableError(f"instance {instance.name} is lost: {reason}"))
        else:
            self._sequences.regain(instance)
        super()._on_outage(instance, reason)
        if reason:
            self._dispatch()

    def _drop(self, request: InferenceRequest) -> None:
        super()._drop(request)
        self._dispatch_soon()  # others of its sequence are to be answered, and its slot is free
