"""Stateful sequences: each has one slot of one instance, and its requests run there one after another.

When a request of a sequence is withdrawn or too late, the whole sequence ends, because later requests would be answered
from a wrong state.
"""

import heapq
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, starmap
from operator import attrgetter

from typing_extensions import override

from weft.base.core import Parameters
from weft.base.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.base.observing.logs import get_logger
from weft.serving.queues.queue import Expired, Expiries, RequestQueue, deadline_error
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings, sequence_parameters
from weft.serving.request.request import InferenceRequest, RequestSequence, SequencePosition

_LOG = get_logger("weft.serving.sequence")
_ARRIVAL = attrgetter("sequence")


class SequenceQueue(RequestQueue):
    """Waiting requests of stateful sequences; each of the instances has ``num_slots`` slots.

    A sequence that starts gets the free slot of the lowest row, or waits in the backlog for the next one. It ends with
    the request that says so, when none came for too long, and when a request of it is withdrawn, is too late, or its
    instance is lost. A request that starts a sequence under an id whose sequence has not ended runs after the requests
    of that, in its slot. In iterative mode each request is a sequence: it is executed until the model releases it.
    Requests with one id run one after another, and one that is withdrawn or too late leaves alone.
    """

    def __init__(self, settings: SchedulerSettings, model: str, instances: Sequence[Hashable]) -> None:
        super().__init__()
        self._settings = settings.sequences or SequenceSettings()
        self._delay_ns = settings.max_queue_delay_us * 1000
        self._idle_ns = self._settings.max_idle_us * 1000
        self._model = model
        self._instances = list(instances)
        #: Slots by row and number of the instance, a heap.
        self._free = [(row, index) for row in range(self._settings.num_slots) for index in range(len(instances))]
        self._lost: set[Hashable] = set()
        self._taken: dict[Hashable, dict[int, RequestSequence]] = {instance: {} for instance in instances}
        self._backlog: OrderedDict[RequestSequence, None] = OrderedDict()  # those that wait for a slot
        self._ready: dict[Hashable, dict[RequestSequence, None]] = {instance: {} for instance in instances}
        self._idle: OrderedDict[RequestSequence, None] = OrderedDict()  # in slots with nothing to do, the longest first
        self._open: dict[int | str, RequestSequence] = {}  # those that take requests
        self._waiting: dict[InferenceRequest, None] = {}
        self._failed: dict[InferenceRequest, WeftError] = {}
        self._numbers = count()
        self._ids = count(1)  # of iterative sequences whose clients name none
        self._expiries = Expiries(num_times=2)
        #: Refuse requests that start a sequence.
        self.is_closing = False

    @override
    def __iter__(self) -> Iterator[InferenceRequest]:
        """In the order of arrival; ``heads`` has those that may run."""
        return iter(self._waiting)

    def __contains__(self, sequence_id: object) -> bool:
        """Whether a sequence of this id has started and not ended."""
        return sequence_id in self._open

    @property
    def num_sequences(self) -> int:
        """Sequences that have started and not ended, including those in the backlog."""
        return sum(map(len, self._taken.values())) + len(self._backlog)

    @override
    def has_work_for(self, instance: Hashable) -> bool:
        return bool(self._ready[instance])

    def heads(self, instance: Hashable) -> list[InferenceRequest]:
        """The next request of each sequence of the instance that is not running, oldest request first."""
        return sorted((sequence.waiting[0] for sequence in self._ready[instance]), key=_ARRIVAL)

    @override
    def add(self, request: InferenceRequest, now_ns: int) -> None:
        """Queue the request, and set its position and time of arrival.

        Raises InvalidArgumentError for more than one row, or a sequence that is not named or has not started;
        DeadlineExceededError; ResourceExhaustedError if too many wait for a slot; UnavailableError if the model is
        being stopped.
        """
        if request.num_rows > 1:
            raise InvalidArgumentError(
                f"inference request to model '{self._model}' must specify batch-size 1 due to requirements of sequence "
                f"batcher, got {request.num_rows}"
            )
        parameters = request.call.parameters
        if self._settings.is_iterative:
            parameters = self._with_start(parameters)
        sequence_id, is_start, is_end = sequence_parameters(parameters, self._model, self._settings.id_datatype)
        deadline_ns = request.context.deadline_ns
        if deadline_ns is not None and deadline_ns <= now_ns:
            raise deadline_error(request, now_ns)
        sequence = self._open.get(sequence_id)
        if sequence is None:
            sequence = self._start(sequence_id, is_start)
        elif is_start and not self._settings.is_iterative:
            _LOG.warning("sequence %r of model '%s' starts again before it ended", sequence_id, self._model)
        if self._settings.is_iterative:
            request.call = replace(request.call, parameters=parameters)
        if is_end:
            del self._open[sequence_id]
        request.position = SequencePosition(sequence, is_start, is_end)
        request.priority = 0
        request.num_queued_at_arrival = self.num_waiting
        sequence.waiting.append(request)
        self._wait(request, now_ns)
        self._idle.pop(sequence, None)
        self._note_ready(sequence)
        if request.queue_timeout_us and sequence.instance is None:
            self._expiries.add(request, now_ns + request.queue_timeout_us * 1000)

    @override
    def take(self, requests: Iterable[InferenceRequest], now_ns: int) -> None:
        """Remove requests, which must be heads and are executed now."""
        for request in requests:
            request.start_ns = now_ns
            sequence = _sequence_of(request)
            sequence.waiting.popleft()
            sequence.running = request
            self._forget(request)
            del self._ready[sequence.instance][sequence]
            if _position(request).is_end:
                self._leave(sequence)

    def executed(
        self, requests: Iterable[InferenceRequest], now_ns: int, again: Collection[InferenceRequest] = ()
    ) -> None:
        """Record that taken requests have run; those in ``again`` are queued again, after the others."""
        for request in requests:
            sequence = _sequence_of(request)
            sequence.running = None
            if sequence.is_over:
                continue
            if request in again:
                self._wait_again(request, now_ns)
            elif self._settings.is_iterative and not sequence.waiting:
                self._end(sequence)
                continue
            self._note_ready(sequence)
            if not sequence.waiting:
                sequence.idle_since_ns = now_ns
                self._idle[sequence] = None

    @override
    def remove(self, request: InferenceRequest) -> bool:
        """Withdraw the request and end its sequence; the next ``expire`` returns the sequence's other requests."""
        if self._failed.pop(request, None) is not None:
            return True
        if request.position is None:
            return False
        sequence = request.position.sequence
        if request not in self._waiting and sequence.running is not request:
            return False
        why = f"sequence {sequence.id!r} was cancelled with one of its requests"
        self._end_with(request, RequestCancelledError(why))
        return self._failed.pop(request, None) is not None

    def lose(self, instance: Hashable) -> None:
        """Remove the slots of an instance and end their sequences."""
        self._lost.add(instance)
        self._free = [slot for slot in self._free if self._instances[slot[1]] != instance]
        heapq.heapify(self._free)
        for sequence in list(self._taken[instance].values()):
            why = "the instance that it ran on is lost; start it again"
            self._end(sequence, UnavailableError(f"sequence {sequence.id!r} ended: {why}"))

    def regain(self, instance: Hashable) -> None:
        """Restore the slots of an instance, if it was lost."""
        if instance in self._lost:
            self._lost.remove(instance)
            for row in range(self._settings.num_slots):
                heapq.heappush(self._free, (row, self._instances.index(instance)))
            self._fill_slots()

    @override
    def expire(self, now_ns: int) -> list[Expired]:
        """End late requests and idle sequences; return also requests whose sequences ended since."""
        while (request := self._expiries.pop(now_ns)) is not None:
            self._expire_one(request, now_ns)
        while self._idle and (sequence := next(iter(self._idle))).idle_since_ns + self._idle_ns <= now_ns:
            _LOG.info("sequence %r of model '%s' was idle for too long and has ended", sequence.id, self._model)
            self._end(sequence)
        expired = list(starmap(Expired, self._failed.items()))
        self._failed.clear()
        return expired

    @override
    def next_expiry_ns(self) -> int | None:
        if self._failed:
            return 0
        expiry_ns = self._expiries.next_ns()
        if not self._idle:
            return expiry_ns
        idle_end_ns = next(iter(self._idle)).idle_since_ns + self._idle_ns
        return idle_end_ns if expiry_ns is None else min(idle_end_ns, expiry_ns)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, sequences and requests agree; for tests."""
        slotted = [sequence for slots in self._taken.values() for sequence in slots.values()]
        known = [*slotted, *self._backlog]
        num_slots = self._settings.num_slots * (len(self._instances) - len(self._lost))
        if not (
            len(known) == len(set(known)) == self.num_sequences
            and not any(sequence.is_over for sequence in known)
            and set(self._open.values()) <= set(known)
            and {request for sequence in known for request in sequence.waiting} == set(self._waiting)
            and len(slotted) + len(self._free) == num_slots
            and not (self._backlog and self._free)
            and all(sequence.waiting for sequence in self._backlog)
            and set(self._idle) == {s for s in slotted if not s.waiting and s.running is None}
            and {s for ready in self._ready.values() for s in ready}
            == {s for s in slotted if s.waiting and s.running is None}
            and set(self._expiries.requests.values()) <= set(self._waiting)
        ):
            raise AssertionError(f"{known=} {self._waiting=} {self._idle=} {self._ready=}")

    def _start(self, sequence_id: int | str, is_start: bool) -> RequestSequence:
        if not is_start:
            raise InvalidArgumentError(
                f"inference request for sequence {sequence_id!r} to model '{self._model}' must specify the START flag "
                "on the first request of the sequence; it was never started, has ended, was cancelled, or was idle for "
                f"more than {self._settings.max_idle_us} us"
            )
        if self.is_closing:
            raise UnavailableError(
                f"model '{self._model}' is being stopped and has stopped accepting new sequences; try again later"
            )
        num_waiting = len(self._backlog)
        if not self._free and 0 < self._settings.max_backlog <= num_waiting:
            raise ResourceExhaustedError(
                f"Exceeds maximum queue size: {num_waiting} sequences of model '{self._model}' wait for a slot, "
                f"{self._settings.max_backlog} may; start the sequence later"
            )
        sequence = self._open[sequence_id] = RequestSequence(sequence_id)
        self._backlog[sequence] = None
        self._fill_slots()
        return sequence

    def _with_start(self, parameters: Parameters) -> Parameters:
        """Parameters of a request that is a whole sequence; without an id it gets a unique one."""
        given = parameters.get("sequence_id")
        while not given:
            number = next(self._ids)
            made = str(number) if self._settings.id_datatype == "BYTES" else number
            given = made if made not in self._open else None
        return {**parameters, "sequence_id": given, "sequence_start": True, "sequence_end": False}

    def _wait(self, request: InferenceRequest, now_ns: int) -> None:
        request.sequence = next(self._numbers)
        request.enqueue_ns = now_ns
        request.send_by_ns = now_ns + self._delay_ns
        self._waiting[request] = None
        self.num_waiting += 1
        if request.context.deadline_ns is not None:
            self._expiries.add(request, request.context.deadline_ns)

    def _wait_again(self, request: InferenceRequest, now_ns: int) -> None:
        sequence = _sequence_of(request)
        request.position = SequencePosition(sequence, is_start=False, is_end=False)
        request.call = replace(request.call, parameters={**request.call.parameters, "sequence_start": False})
        request.start_ns = 0
        sequence.waiting.appendleft(request)
        self._wait(request, now_ns)

    def _fill_slots(self) -> None:
        while self._backlog and self._free:
            sequence, _ = self._backlog.popitem(last=False)
            sequence.row, index = heapq.heappop(self._free)
            sequence.instance = self._instances[index]
            self._taken[sequence.instance][sequence.row] = sequence
            self._note_ready(sequence)

    def _note_ready(self, sequence: RequestSequence) -> None:
        if sequence.instance is None or sequence.running is not None or not sequence.waiting:
            return
        ready = self._ready[sequence.instance]
        if sequence in ready:
            return
        ready[sequence] = None
        head = sequence.waiting[0]
        if self._settings.has_varying_state and not _position(head).is_start:
            head.batch_key = head.batch_key, tuple([tensor.shape for tensor in sequence.state.values()])

    def _end(self, sequence: RequestSequence, error: WeftError | None = None) -> None:
        if sequence.is_over:
            return
        if self._open.get(sequence.id) is sequence:
            del self._open[sequence.id]
        for request in sequence.waiting:
            self._forget(request)
            if error is not None:
                self._failed[request] = error.with_message(error.message)
        sequence.waiting.clear()
        self._leave(sequence)

    def _end_with(self, request: InferenceRequest, error: WeftError) -> None:
        """End the sequence of a request; an iterative one only if it has no other request."""
        sequence = _sequence_of(request)
        has_others = any(other not in (None, request) for other in (sequence.running, *sequence.waiting))
        if not (self._settings.is_iterative and has_others):
            self._end(sequence, error)
        elif request in self._waiting:
            sequence.waiting.remove(request)
            self._forget(request)
            self._failed[request] = error

    def _leave(self, sequence: RequestSequence) -> None:
        sequence.is_over = True
        instance = sequence.instance
        if instance is None:
            del self._backlog[sequence]
            return
        self._ready[instance].pop(sequence, None)
        self._idle.pop(sequence, None)
        del self._taken[instance][sequence.row]
        if instance not in self._lost:
            heapq.heappush(self._free, (sequence.row, self._instances.index(instance)))
            self._fill_slots()

    def _expire_one(self, request: InferenceRequest, now_ns: int) -> None:
        sequence = _sequence_of(request)
        deadline_ns = request.context.deadline_ns
        if deadline_ns is not None and deadline_ns <= now_ns:
            why = "the deadline of one of its requests passed; start it again"
            self._end_with(request, UnavailableError(f"sequence {sequence.id!r} ended: {why}"))
            self._failed[request] = deadline_error(request, now_ns)
        elif sequence.instance is None:
            self._end_with(request, DeadlineExceededError("timeout of the corresponding sequence has been expired"))

    def _forget(self, request: InferenceRequest) -> None:
        del self._waiting[request]
        self.num_waiting -= 1
        self._expiries.discard(request)


def _position(request: InferenceRequest) -> SequencePosition:
    if request.position is None:
        raise ValueError("the request is not in a sequence")
    return request.position


def _sequence_of(request: InferenceRequest) -> RequestSequence:
    return _position(request).sequence
