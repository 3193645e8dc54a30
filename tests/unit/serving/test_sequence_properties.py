"""Whatever happens in whatever order, no request of a sequence is lost, answered twice or run out of turn."""

from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import make_sequence_batcher

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
