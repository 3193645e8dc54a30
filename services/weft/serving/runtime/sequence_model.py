"""A loaded model version whose requests belong to stateful sequences."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

from weft.base.core import InferCall
from weft.base.errors import UnavailableError
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import LengthBuckets, num_to_hold
from weft.serving.request.request import InferenceRequest
from weft.serving.runtime.dispatcher import Dispatcher
from weft.serving.runtime.execution import BackgroundThread, BatchExecution
from weft.serving.runtime.instance import Instance
from weft.serving.runtime.model import ServedModel
from weft.serving.scheduler.batcher import Batcher, make_sequence_batcher


class SequenceDispatcher(Dispatcher):
    """Runs the requests of a stateful sequence one after another on one instance.

    ``all_over`` is set when the model is closed and its last sequence has ended, or need not be waited for; ``on_free``
    is called when the last sequence has ended.
    """

    sequences: SequenceQueue

    def _make_queue(self) -> SequenceQueue:
        self.all_over = asyncio.Event()
        self.on_free: Callable[[], None] = lambda: None
        self._had_sequences = False
        self.sequences = SequenceQueue(self._settings, self._signature.name, self._instances)
        return self.sequences

    def _make_batcher(self, buckets: LengthBuckets | None) -> Batcher:
        return make_sequence_batcher(self.sequences, self._settings, self._idle, num_to_hold=num_to_hold())

    async def stop(self, *, grace_s: float) -> None:
        """As ``Dispatcher.stop``; sequences that have started go on within the grace, and no other starts."""
        end_s = time.monotonic() + grace_s
        self.sequences.is_closing = True
        if self.is_open and self.sequences.num_sequences:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.all_over.wait()
        await super().stop(grace_s=max(end_s - time.monotonic(), 0.0))

    def dispatch(self) -> None:
        """As ``Dispatcher.dispatch``; what waits for the last sequence to end goes on when it has."""
        super().dispatch()
        if self.sequences.num_sequences:
            self._had_sequences = True
            return
        if self.sequences.is_closing:
            self.all_over.set()
        if self._had_sequences:
            self._had_sequences = False
            self.on_free()

    def drop(self, request: InferenceRequest) -> None:
        """As ``Dispatcher.drop``; the sequence of the request ends with it."""
        super().drop(request)
        self.dispatch_soon()  # others of its sequence are to be answered, and its slot is free

    def _on_executed(self, instance: Instance | BackgroundThread, execution: BatchExecution) -> None:
        again = {
            request
            for request, answer in zip(execution.requests, execution.answers, strict=True)
            if answer is None and request.answer is not None and not request.answer.done()
        }
        self.sequences.executed(self._running[instance], time.monotonic_ns(), again)
        super()._on_executed(instance, execution)

    def _on_crash(self, instance: Instance, reason: str) -> None:
        if not reason:
            self.sequences.regain(instance)
            super()._on_crash(instance, reason)
            return
        self.sequences.lose(instance)
        for request in self._running.get(instance, ()):
            # The state is lost too, so that another try would begin in the middle of the sequence.
            if request.answer is not None and not request.answer.done():
                self.answers.withdraw(request, UnavailableError(f"instance {instance.name} is lost: {reason}"))
        super()._on_crash(instance, reason)
        self.dispatch()


class SequenceModel(ServedModel):
    """Answers the requests of stateful sequences.

    A sequence ends when one of its requests is withdrawn, whether that waits or runs, and when its instance is lost;
    its other requests then fail, and what comes later must start it again.
    """

    dispatcher_class = SequenceDispatcher
    _dispatcher: SequenceDispatcher

    @property
    def has_sequences(self) -> bool:
        """Whether a sequence has started and not ended; it may have no request here just now."""
        return self._dispatcher.sequences.num_sequences > 0

    def continues(self, call: InferCall) -> bool:
        """Whether the call continues a sequence that has started here."""
        parameters, sequences = call.parameters, self._settings.sequences
        return (
            self._dispatcher.is_open
            and not (sequences is not None and sequences.is_iterative)
            and parameters.get("sequence_id") in self._dispatcher.sequences
            and not parameters.get("sequence_start")
        )

    def expect_no_more(self) -> None:
        """Have a stop not wait for sequences that have started: nobody can send requests any more."""
        self._dispatcher.all_over.set()

    def when_free(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called whenever the last sequence has ended."""
        self._dispatcher.on_free = callback
