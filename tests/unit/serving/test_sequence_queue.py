"""Which requests of sequences wait, run and are given up: cases in ``timelines/``, and operations at random."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from tests.case_files import Case, cases, literals

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.base.tensors import WireTensor
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import make_sequence_batcher

TIMELINES = Path(__file__).parent / "timelines"
US = 1000
#: Fields of a request that are not parameters of its call.
OWN = ("rows", "priority", "timeout_us", "deadline", "key")


class Timeline:
    """A queue with its batcher and a clock, whose requests have names."""

    def __init__(self, case: Case) -> None:
        sequences = SequenceSettings(**{"num_slots": 1, "max_idle_us": 500, **literals(case.option("queue"))})
        scheduler = SchedulerSettings(4, is_batching=True, sequences=sequences, **literals(case.option("set")))
        self.instances = list(case.option("instances", "X"))
        self.queue = SequenceQueue(scheduler, "m", list(self.instances))
        self.batcher = make_sequence_batcher(
            self.queue, scheduler, self.instances, num_to_hold=int(case.option("hold", "0"))
        )
        self.requests: dict[str, InferenceRequest] = {}
        self.running: dict[str, list[InferenceRequest]] = {}
        self.now_ns = 0

    def run_line(self, line: str) -> Iterator[str]:
        """What the commands of a line say."""
        for command in line.split(", "):
            name, *words = command.split()
            yield from getattr(self, name)(*words) or ()
            self.queue.check_integrity()

    def at(self, time_us: str) -> None:
        self.now_ns = int(time_us) * US

    def add(self, *words: str) -> Iterator[str]:
        fields = literals(" ".join(word for word in words if "=" in word))
        own = {name: fields.pop(name, None) for name in OWN}
        deadline_ns = None if own["deadline"] is None else own["deadline"] * US
        for name in (word for word in words if "=" not in word):
            flags = {"sequence_start": name[0].isupper(), "sequence_end": name.endswith("!")}
            call = InferCall("m", parameters={"sequence_id": name[0].lower(), **flags, **fields})
            self.requests[name] = request = InferenceRequest(
                call,
                CallContext(deadline_ns=deadline_ns),
                own["rows"] or 1,
                own["priority"] or 0,
                queue_timeout_us=own["timeout_us"] or 0,
                batch_key=own["key"],
            )
            try:
                self.queue.add(request, self.now_ns)
            except WeftError as error:
                yield f"{name} is refused: {type(error).__name__}: {error.message}"

    def heads(self, instance: str) -> Iterator[str]:
        yield f"{self._names(self.queue.heads(instance))} may run on {instance}"

    def take(self, instance: str) -> Iterator[str]:
        self.running[instance] = self.queue.heads(instance)
        self.queue.take(self.running[instance], self.now_ns)
        yield f"{self._names(self.running[instance])} on {instance}"

    def done(self, instance: str) -> None:
        self.queue.executed(self.running.pop(instance), self.now_ns)

    def again(self, instance: str) -> None:
        requests = self.running.pop(instance)
        self.queue.executed(requests, self.now_ns, set(requests))

    def run(self, instance: str) -> Iterator[str]:
        yield from self.take(instance)
        self.done(instance)

    def batch(self, *, may_wait: bool = True) -> Iterator[str]:
        requests, wait_until_ns, instance = self.batcher.next_batch(self.queue, self.now_ns, may_wait=may_wait)
        self.queue.take(requests, self.now_ns)
        self.queue.executed(requests, self.now_ns)
        waits = "none yet" if wait_until_ns is None else f"none before {wait_until_ns / US:g} us"
        yield f"{self._names(requests)} on {instance}" if requests else waits

    def drain(self) -> Iterator[str]:
        return self.batch(may_wait=False)

    def remove(self, name: str) -> Iterator[str]:
        yield f"{name} " + ("is removed" if self.queue.remove(self.requests[name]) else "did not wait")

    def expire(self) -> Iterator[str]:
        expired = self.queue.expire(self.now_ns)
        lines = sorted(f"{self._names([r])} is given up: {type(e).__name__}: {e.message}" for r, e in expired)
        yield from lines or ["nobody is given up"]

    def due(self) -> Iterator[str]:
        due_ns = self.queue.next_expiry_ns()
        yield "never" if due_ns is None else f"at {due_ns / US:g} us"

    def lose(self, instance: str) -> None:
        self.queue.lose(instance)

    def regain(self, instance: str) -> None:
        self.queue.regain(instance)

    def close(self) -> None:
        self.queue.is_closing = True

    def idle(self, instances: str) -> None:
        self.instances[:] = instances

    def count(self) -> Iterator[str]:
        yield f"{self.queue.num_sequences} sequences, {len(self.queue)} requests wait"

    def levels(self) -> Iterator[str]:
        yield f"by level {self.queue.num_by_level()}"

    def show(self, name: str) -> Iterator[str]:
        request = self.requests[name]
        start = ("goes on", "starts")[request.position.is_start]
        row = request.position.sequence.row
        parameters = request.call.parameters
        times = f"came at {request.enqueue_ns / US:g} us, level {request.priority}, began {request.start_ns}"
        yield f"{name} {start} sequence {parameters['sequence_id']!r} in row {row}, {times}, told {parameters}"

    def state(self, name: str, length: str) -> None:
        tensor = WireTensor("INT8", (1, int(length)), bytes(int(length)))
        self.requests[name].position.sequence.state["S"] = tensor

    def _names(self, requests: Iterable[InferenceRequest]) -> str:
        names = {request: name for name, request in self.requests.items()}
        return " ".join(names[request] for request in requests) or "nobody"


@cases(TIMELINES / "sequences.txt")
def test_timeline(case: Case) -> None:
    """Requests of sequences wait, run together and are given up as the case says."""
    case.check_script(Timeline(case).run_line)


INSTANCES = ("X", "Y")


class SequenceMachine(RuleBasedStateMachine):
    """Clients start, go on, end, leave and come late, with two instances of two slots, and nothing is lost."""

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
