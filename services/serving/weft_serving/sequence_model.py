"""A loaded model version whose requests belong to sequences."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from weft_common.core import InferCall
from weft_common.errors import UnavailableError
from weft_common.statistics import ModelStatistics
from weft_serving.backends.base import Backend, InstanceContext, ModelContext
from weft_serving.instance import Execution, Instance
from weft_serving.model import ServedModel
from weft_serving.rate_limiter import RateLimiter
from weft_serving.request import InferenceRequest
from weft_serving.scheduler.sequence import SequenceQueue
from weft_serving.scheduler.sequence_batcher import make_sequence_batcher
from weft_serving.scheduler.settings import SchedulerSettings, num_to_hold


class SequenceModel(ServedModel):
    """Runs the requests of a sequence one after another on one instance.

    A sequence ends when one of its requests is withdrawn, whether that waits or runs, and when its instance is lost;
    its other requests then fail, and what comes later must start it again. Arguments and errors are those of
    ``ServedModel``.
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

    def continues(self, call: InferCall) -> bool:
        """Whether the call is one of a sequence that has started here and goes on."""
        parameters = call.parameters
        return (
            self._is_accepting
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

    async def _checked(self, call: InferCall) -> tuple[int, list[InferCall]]:
        return self._check(call)  # many strings too: on a thread, the next request of the sequence would overtake

    def _dispatch(self) -> None:
        super()._dispatch()
        if self._sequences.is_closing and not self._sequences.num_sequences:
            self._all_over.set()

    def _on_executed(self, instance: Instance, execution: Execution) -> None:
        self._sequences.executed(self._running[instance], time.monotonic_ns())
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
        if not self._is_dispatch_due:  # others of its sequence are to be answered, and its slot is free
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)
