"""Which requests of sequences share a batch: the outcomes of both strategies, with a virtual clock."""

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import make_sequence_batcher

DELAY_US = 100
DELAY_NS = DELAY_US * 1000


class Batches:
    """A queue with its batcher, whose instances run each batch at once."""

    def __init__(self, *, instances="X", num_to_hold=0, preferred=(), delay_us=0, **settings):
        policy = SequenceSettings(max_queue_delay_us=delay_us, **settings)
        scheduler = SchedulerSettings(
            4, is_batching=True, preferred_batch_sizes=preferred, max_queue_delay_us=delay_us, sequences=policy
        )
        self.queue = SequenceQueue(scheduler, "m", list(instances))
        self.idle = list(instances)
        self.batcher = make_sequence_batcher(self.queue, scheduler, self.idle, num_to_hold=num_to_hold)

    def add(self, *names, at_ns=0, key=None):
        """Requests of sequences named by one letter; a capital starts it."""
        for name in names:
            parameters = {"sequence_id": name.lower(), "sequence_start": name.isupper()}
            request = InferenceRequest(InferCall("m", name, parameters=parameters), CallContext(), batch_key=key)
            self.queue.add(request, at_ns)

    def next(self, at_ns=0, *, may_wait=True):
        """Names of the next batch, or until when to wait."""
        decision = self.batcher.next_batch(self.queue, at_ns, may_wait=may_wait)
        self.queue.take(decision.requests, at_ns)
        self.queue.executed(decision.requests, at_ns)
        if decision.requests:
            self.instance = decision.instance
        return "".join(request.call.model_version for request in decision.requests) or decision.wait_until_ns


@pytest.mark.parametrize("is_direct", [True, False])
def test_one_request_of_each_sequence_in_a_batch(is_direct):
    """Requests of different sequences share a batch; two of the same never do."""
    batches = Batches(is_direct=is_direct, num_slots=4)
    batches.add("A", "a", "B", "C")
    assert ["ABC", "a", None] == [batches.next() for _ in range(3)]


@pytest.mark.parametrize("is_direct", [True, False])
def test_the_instance_is_that_of_the_sequences(is_direct):
    """A free instance without requests is passed over."""
    batches = Batches(is_direct=is_direct, num_slots=4, instances="XY")
    batches.add("A", "B")
    assert [("A", "X"), ("B", "Y")] == [(batches.next(), batches.instance) for _ in range(2)]
    batches.add("b")
    assert ("b", "Y") == (batches.next(), batches.instance)
    batches.idle.remove("Y")
    batches.add("b")
    assert batches.next() is None


def test_direct_waits_for_its_share_of_the_slots():
    """With half of four slots wanted, one request waits for a second, no longer than the delay."""
    batches = Batches(num_slots=4, delay_us=DELAY_US, minimum_slot_utilization=0.5)
    batches.add("A")
    assert DELAY_NS == batches.next()
    batches.add("B", at_ns=10)
    assert "AB" == batches.next(10)
    batches.add("a", at_ns=20)
    assert ["a", DELAY_NS + 20] == [batches.next(20, may_wait=False), batches.add("b", at_ns=20) or batches.next(20)]
    assert "b" == batches.next(DELAY_NS + 20)


def test_direct_does_not_wait_without_a_share():
    """The delay alone means nothing, as in Triton Inference Server."""
    batches = Batches(num_slots=4, delay_us=DELAY_US)
    batches.add("A")
    assert "A" == batches.next()


def test_direct_leaves_out_what_does_not_fit():
    """Rows whose shapes differ from those of the oldest request wait for the next batch."""
    batches = Batches(num_slots=4)
    batches.add("A", key=1)
    batches.add("B", key=2)
    batches.add("C", key=1)
    assert ["AC", "B"] == [batches.next(), batches.next()]


@pytest.mark.parametrize(("has_varying_state", "expected"), [(True, ["ac", "b", "D"]), (False, ["abcD"])])
def test_states_of_one_shape_share_a_batch(has_varying_state, expected):
    """Where states may differ in shape, those that do are in batches of their own; those of starts are one kind."""
    batches = Batches(is_direct=False, num_slots=8, has_varying_state=has_varying_state)
    batches.add("A", "B", "C")
    requests = list(batches.queue)
    batches.next()
    for request, length in zip(requests, (1, 2, 1), strict=True):
        request.position.sequence.state["S"] = WireTensor("INT8", (1, length), bytes(length))
    batches.add("a", "b", "c", "D", "a")
    assert expected == [batches.next() for _ in expected]


def test_oldest_takes_the_oldest_requests_first():
    """Not the order of the sequences counts but that of the requests that are next."""
    batches = Batches(is_direct=False, num_slots=8)
    batches.add("A", "B", "C")
    assert "ABC" == batches.next()
    batches.add("c", "a", "b")
    assert "cab" == batches.next()


def test_oldest_is_limited_by_batch_size_and_candidates():
    """A batch has four rows at most, and six of the eight sequences are candidates."""
    batches = Batches(is_direct=False, num_slots=6)
    batches.add(*"ABCDEFGH")
    assert ["ABCD", "EF", None] == [batches.next() for _ in range(3)]


def test_oldest_waits_as_dynamic_batching_does():
    """A batch of a preferred size goes at once, a smaller one after the delay of its oldest request."""
    batches = Batches(is_direct=False, num_slots=8, preferred=(2,), delay_us=DELAY_US)
    batches.add("A")
    assert DELAY_NS == batches.next()
    batches.add("B", at_ns=5)
    assert "AB" == batches.next(5)
    batches.add("b", at_ns=6)
    assert "b" == batches.next(DELAY_NS + 6)


@pytest.mark.parametrize("is_direct", [True, False])
def test_hold_until_so_many_wait(is_direct):
    """For tests: the first batch is formed when that many requests are queued."""
    batches = Batches(is_direct=is_direct, num_slots=4, num_to_hold=3)
    batches.add("A", "a")
    assert batches.next() is None
    batches.add("B")
    assert "AB" == batches.next()
    assert "a" == batches.next()


INSTANCES = ("X", "Y")


class SequenceMachine(RuleBasedStateMachine):
    """Clients that start, go on, end, leave and come late, with two instances of two slots."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = 0
        policy = SequenceSettings(is_direct=False, num_slots=2, max_idle_us=1)
        scheduler = SchedulerSettings(4, is_batching=True, sequences=policy)
        self.queue = SequenceQueue(scheduler, "m", INSTANCES)
        self.idle = list(INSTANCES)
        self.batcher = make_sequence_batcher(self.queue, scheduler, self.idle)
        self.running: dict[str, list[InferenceRequest]] = {}
        self.unanswered: list[InferenceRequest] = []
        self.num_run: dict[Any, int] = {}  # by sequence

    @rule(
        sequence_id=st.integers(1, 6),
        is_start=st.booleans(),
        is_end=st.booleans(),
        deadline_ns=st.none() | st.integers(0, 3000),
        timeout_us=st.integers(0, 2),
    )
    def arrive(self, sequence_id, is_start, is_end, deadline_ns, timeout_us):
        parameters = {"sequence_id": sequence_id, "sequence_start": is_start, "sequence_end": is_end}
        context = CallContext(deadline_ns=None if deadline_ns is None else self.now_ns + deadline_ns)
        request = InferenceRequest(InferCall("m", parameters=parameters), context, queue_timeout_us=timeout_us)
        try:
            self.queue.add(request, self.now_ns)
        except WeftError:
            assert deadline_ns == 0 or not is_start
        else:
            self.unanswered.append(request)

    @rule()
    def dispatch(self):
        for request, _ in self.queue.expire(self.now_ns):
            self.unanswered.remove(request)
        while True:
            requests, _, instance = self.batcher.next_batch(self.queue, self.now_ns)
            if not requests:
                return
            sequences = [request.position.sequence for request in requests]
            assert len(sequences) == len(set(sequences))
            for request in requests:
                earlier = [r for r in self.unanswered if r.position.sequence is request.position.sequence]
                assert request is min(earlier, key=lambda r: r.sequence)
                assert request.position.sequence.instance == instance
            self.queue.take(requests, self.now_ns)
            self.idle.remove(instance)  # type: ignore[arg-type]
            self.running[instance] = requests  # type: ignore[index]

    @precondition(lambda self: self.running)
    @rule(instance=st.sampled_from(INSTANCES))
    def finish(self, instance):
        requests = self.running.pop(instance, [])
        self.queue.executed(requests, self.now_ns)
        if requests:
            self.idle.append(instance)
        for request in requests:
            if request in self.unanswered:
                self.unanswered.remove(request)

    @precondition(lambda self: self.unanswered)
    @rule(data=st.data())
    def leave(self, data):
        request = data.draw(st.sampled_from(self.unanswered))
        self.queue.remove(request)
        self.unanswered.remove(request)

    @rule(instance=st.sampled_from(INSTANCES))
    def lose(self, instance):
        self.queue.lose(instance)
        for request in self.running.pop(instance, []):
            self.queue.executed([request], self.now_ns)
            if request in self.unanswered:
                self.unanswered.remove(request)
        if instance in self.idle:
            self.idle.remove(instance)

    @rule(instance=st.sampled_from(INSTANCES))
    def regain(self, instance):
        if instance not in self.running and instance not in self.idle:
            self.queue.regain(instance)
            self.idle.append(instance)

    @rule(passed_ns=st.integers(1, 1500))
    def wait(self, passed_ns):
        self.now_ns += passed_ns

    @invariant()
    def nothing_is_lost(self):
        self.queue.check_integrity()
        running = [r for requests in self.running.values() for r in requests]
        known = {*self.queue, *running, *self.queue._failed}
        assert set(self.unanswered) <= known

    def teardown(self):
        for request in list(self.unanswered):
            self.queue.remove(request)
        for requests in self.running.values():
            self.queue.executed(requests, self.now_ns)
        self.queue.expire(self.now_ns + 10**9)
        self.queue.check_integrity()
        assert (0, 0) == (len(self.queue), self.queue.num_sequences)


TestSequences = SequenceMachine.TestCase
TestSequences.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
