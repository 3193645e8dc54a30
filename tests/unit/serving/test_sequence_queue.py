"""Sequences wait, run, end and are given up, as policy with a virtual clock."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from weft.base.core import CallContext, InferCall
from weft.base.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnavailableError,
    WeftError,
)
from weft.serving.queues.sequence import SequenceQueue
from weft.serving.queues.settings import SchedulerSettings, SequenceSettings
from weft.serving.request.request import InferenceRequest

US = 1000
IDLE_US = 500


class Sequences:
    """A queue, and requests named by id and number in their sequence."""

    def __init__(self, num_slots: int, instances: str, **settings: Any) -> None:
        self.now_ns = 0
        sequences = SequenceSettings(num_slots=num_slots, max_idle_us=IDLE_US, **settings)
        self.queue = SequenceQueue(SchedulerSettings(8, sequences=sequences), "m", list(instances))
        self.names: dict[InferenceRequest, str] = {}

    def add(
        self,
        name: str,
        flags: str = "",
        *,
        rows: int = 1,
        priority: int = 0,
        timeout_us: int = 0,
        deadline_ns: int | None = None,
        **parameters: Any,
    ) -> InferenceRequest:
        """``add("a1", "s")`` is a request of sequence "a"; flags: s start, e end."""
        given = {"sequence_id": name[0], "sequence_start": "s" in flags, "sequence_end": "e" in flags, **parameters}
        context = CallContext(deadline_ns=deadline_ns)
        request = InferenceRequest(
            InferCall("m", parameters=given), context, rows, priority, queue_timeout_us=timeout_us
        )
        self.queue.add(request, self.now_ns)
        self.names[request] = name
        self.queue.check_integrity()
        return request

    def heads(self, instance: str) -> list[str]:
        """What the instance could run."""
        return [self.names[request] for request in self.queue.heads(instance)]

    def take(self, instance: str) -> list[InferenceRequest]:
        """The instance begins with all it can run."""
        requests = self.queue.heads(instance)
        self.queue.take(requests, self.now_ns)
        self.queue.check_integrity()
        return requests

    def run(self, instance: str) -> list[str]:
        """The instance runs all it can."""
        requests = self.take(instance)
        self.queue.executed(requests, self.now_ns)
        self.queue.check_integrity()
        return [self.names[request] for request in requests]

    def given_up(self, at_us: int = 0) -> list[tuple[str, type[WeftError]]]:
        """What is given up until then."""
        self.now_ns = max(self.now_ns, at_us * US)
        expired = self.queue.expire(self.now_ns)
        self.queue.check_integrity()
        return [(self.names[request], type(error)) for request, error in expired]


@pytest.fixture
def make() -> Callable[..., Sequences]:
    """``make(num_slots, instances)``; instances are letters."""
    return Sequences


def test_requests_of_one_sequence_run_one_after_another(make):
    """Three requests that come together need three batches, in order."""
    sequences = make(2, "X")
    for name, flags in (("a1", "s"), ("a2", ""), ("a3", "e")):
        sequences.add(name, flags)
    assert [["a1"], ["a2"], ["a3"], []] == [sequences.run("X") for _ in range(4)]
    assert 0 == sequences.queue.num_sequences


def test_a_request_waits_while_the_one_before_runs(make):
    """It is no head before the one before has run."""
    sequences = make(2, "X")
    sequences.add("a1", "s")
    running = sequences.take("X")
    sequences.add("a2")
    assert [] == sequences.heads("X")
    sequences.queue.executed(running, 0)
    assert ["a2"] == sequences.heads("X")


def test_sequences_spread_over_the_instances_and_stay(make):
    """The lowest rows of all instances are taken first; each request goes where its sequence is."""
    sequences = make(2, "XY")
    for name in "abcd":
        sequences.add(f"{name}1", "s")
    assert ["a1", "c1"] == sequences.run("X")
    assert ["b1", "d1"] == sequences.run("Y")
    sequences.add("d2")
    sequences.add("a2")
    assert [["a2"], ["d2"]] == [sequences.run("X"), sequences.run("Y")]
    assert [0, 0, 1, 1] == [request.position.sequence.row for request in list(sequences.names)[:4]]


def test_backlog_is_served_in_order_when_slots_become_free(make):
    """Requests of sequences without a slot wait, with all that follows, for one that ends."""
    sequences = make(1, "X")
    sequences.add("a1", "s")
    for name, flags in (("b1", "s"), ("c1", "se"), ("b2", "e")):
        sequences.add(name, flags)
    assert ["a1"] == sequences.run("X")
    assert [] == sequences.run("X")
    sequences.add("a2", "e")
    assert ["a2", "b1", "b2", "c1"] == [sequences.run("X")[0] for _ in range(4)]


def test_the_slot_is_free_when_the_last_request_is_taken(make):
    """The next sequence need not wait for the answer; it runs in the next batch."""
    sequences = make(1, "X")
    sequences.add("a1", "se")
    sequences.add("b1", "s")
    running = sequences.take("X")
    assert ["b1"] == sequences.heads("X")
    sequences.queue.executed(running, 0)
    assert ["b1"] == sequences.run("X")


def test_the_id_is_free_when_the_last_request_came(make):
    """A sequence may start under the id of one that has got its last request; the two are not one."""
    sequences = make(2, "X")
    first = sequences.add("a1", "s")
    sequences.add("a2", "e")
    other = sequences.add("a1", "s")
    assert first.position.sequence is not other.position.sequence
    assert 2 == sequences.queue.num_sequences


def test_start_of_a_sequence_that_goes_on_restarts_it(make):
    """It runs after the requests before, in the same slot, and is told to the model as a start."""
    sequences = make(2, "X")
    first, again = sequences.add("a1", "s"), sequences.add("a2", "s")
    assert (True, True) == (again.position.is_start, first.position.sequence is again.position.sequence)
    assert [["a1"], ["a2"]] == [sequences.run("X"), sequences.run("X")]


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"sequence_id": 0}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": ""}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": True}, "invalid value type for 'sequence_id' parameter"),
        ({"sequence_id": 1.5}, "invalid value type for 'sequence_id' parameter"),
        ({"sequence_id": "x" * 129}, "string correlation ID cannot be longer than 128 characters, got 129 bytes"),
        ({"sequence_id": 2**64}, "takes its correlation ID as UINT64"),
        ({"sequence_start": 1}, "invalid value type for 'sequence_start' parameter"),
        ({"sequence_end": "yes"}, "invalid value type for 'sequence_end' parameter"),
        ({}, "inference request for sequence 'a' to model 'm' must specify the START flag on the first request"),
        ({"rows": 2}, "'m' must specify batch-size 1 due to requirements of sequence batcher, got 2"),
    ],
)
def test_refused_at_the_door(make, parameters, expected):
    """A request that belongs to no sequence is wrong, and nothing is changed."""
    sequences = make(1, "X")
    with pytest.raises(InvalidArgumentError, match=re.escape(expected)):
        sequences.add("a1", **parameters)
    sequences.queue.check_integrity()
    assert (0, 0) == (len(sequences.queue), sequences.queue.num_sequences)


@pytest.mark.parametrize(
    ("datatype", "sequence_id", "is_taken"),
    [
        ("INT32", 2**31 - 1, True), ("INT32", 2**31, False), ("UINT32", -1, False), ("UINT64", 2**64 - 1, True),
        ("INT64", -5, True), ("INT32", "5", False), ("BYTES", "5", True), ("BYTES", 5, False),
    ],
)  # fmt: skip
def test_id_must_fit_the_input_that_gets_it(make, datatype, sequence_id, is_taken):
    """An id that the model's input cannot hold is refused."""
    sequences = make(1, "X", id_datatype=datatype)
    if is_taken:
        sequences.add("a1", "s", sequence_id=sequence_id)
    else:
        with pytest.raises(InvalidArgumentError, match="takes its correlation ID as"):
            sequences.add("a1", "s", sequence_id=sequence_id)


def test_priorities_mean_nothing(make):
    """Requests of sequences have no levels, whatever a client sends."""
    sequences = make(1, "X")
    request = sequences.add("a1", "s", priority=7)
    assert (0, {0: 1}) == (request.priority, sequences.queue.num_by_level())


def test_ids_of_different_types_differ(make):
    """5 and "5" are two sequences."""
    sequences = make(2, "X")
    sequences.add("a1", "s", sequence_id=5)
    sequences.add("b1", "s", sequence_id="5")
    assert 2 == sequences.queue.num_sequences


def test_an_idle_sequence_ends_and_gives_its_slot_away(make):
    """The time counts from the end of its latest execution; the next one has its slot, its own requests are refused."""
    sequences = make(1, "X")
    sequences.add("a1", "s")
    running = sequences.take("X")
    sequences.add("b1", "s")
    assert [] == sequences.given_up(at_us=IDLE_US + 100)
    sequences.queue.executed(running, sequences.now_ns)
    assert (2 * IDLE_US + 100) * US == sequences.queue.next_expiry_ns()
    assert [] == sequences.given_up(at_us=2 * IDLE_US + 99)
    assert [] == sequences.heads("X")
    assert [] == sequences.given_up(at_us=2 * IDLE_US + 100)
    assert ["b1"] == sequences.heads("X")
    with pytest.raises(InvalidArgumentError, match="idle for more than 500 us"):
        sequences.add("a2")


def test_a_request_keeps_its_sequence_alive(make):
    """Each one starts the time anew."""
    sequences = make(1, "X")
    sequences.add("a1", "s")
    for at_us in range(0, 5 * IDLE_US, IDLE_US - 1):
        sequences.given_up(at_us)
        assert 1 == len(sequences.run("X"))
        sequences.add("a2")
    assert 1 == sequences.queue.num_sequences


def test_withdrawn_request_ends_its_sequence(make):
    """Those that wait with it fail, the slot is free, and what comes later is refused."""
    sequences = make(1, "X")
    for name, flags in (("a1", "s"), ("a2", ""), ("a3", "")):
        sequences.add(name, flags)
    sequences.add("b1", "s")
    assert sequences.queue.remove(next(r for r, name in sequences.names.items() if name == "a2"))
    assert 0 == sequences.queue.next_expiry_ns()
    assert [("a1", RequestCancelledError), ("a3", RequestCancelledError)] == sequences.given_up()
    assert ["b1"] == sequences.heads("X")
    with pytest.raises(InvalidArgumentError, match="START flag"):
        sequences.add("a4")


def test_withdrawn_while_it_runs(make):
    """The sequence ends as well; what it left in the model cannot be known to the client."""
    sequences = make(1, "X")
    running = sequences.add("a1", "s")
    sequences.take("X")
    sequences.add("a2")
    assert not sequences.queue.remove(running)
    assert [("a2", RequestCancelledError)] == sequences.given_up()
    sequences.queue.executed([running], 0)
    sequences.queue.check_integrity()
    assert 0 == sequences.queue.num_sequences


def test_withdrawn_together_each_fails_once(make):
    """A client that leaves with all its requests: none of them is given up by the queue."""
    sequences = make(1, "X")
    requests = [sequences.add("a1", "s"), sequences.add("a2"), sequences.add("a3")]
    assert [True, True, True, False] == [sequences.queue.remove(r) for r in [*requests, requests[0]]]
    assert [] == sequences.given_up()


def test_withdrawn_after_its_answer_changes_nothing(make):
    """A request that has run no longer ends its sequence."""
    sequences = make(1, "X")
    request = sequences.add("a1", "s")
    sequences.run("X")
    assert not sequences.queue.remove(request)
    assert 1 == sequences.queue.num_sequences


def test_deadline_of_one_request_ends_the_sequence(make):
    """The late one fails with DEADLINE_EXCEEDED, the others that wait because of it."""
    sequences = make(1, "X")
    sequences.add("a1", "s")
    sequences.take("X")
    sequences.add("a2", deadline_ns=50 * US)
    sequences.add("a3")
    assert 50 * US == sequences.queue.next_expiry_ns()
    assert {("a2", DeadlineExceededError), ("a3", UnavailableError)} == set(sequences.given_up(at_us=50))
    with pytest.raises(DeadlineExceededError):
        sequences.add("b1", "s", deadline_ns=50 * US)


def test_timeout_counts_in_the_backlog_alone(make):
    """A sequence in the backlog fails as a whole; one that has its slot does not."""
    sequences = make(1, "X")
    sequences.add("a1", "s", timeout_us=10)
    sequences.add("b1", "s", timeout_us=20)
    sequences.add("b2")
    assert [("b1", DeadlineExceededError), ("b2", DeadlineExceededError)] == sequences.given_up(at_us=20)
    assert ["a1"] == sequences.heads("X")
    sequences.add("c1", "s", timeout_us=10)
    sequences.add("a2", "e")
    assert [["a1"], ["a2"], ["c1"]] == [sequences.run("X"), sequences.run("X"), sequences.heads("X")]
    assert [] == sequences.given_up(at_us=40)


def test_a_lost_instance_ends_its_sequences(make):
    """Others go on; the backlog waits for slots of instances that run, and has those that come back."""
    sequences = make(1, "XY")
    for name, flags in (("a1", "s"), ("b1", "s"), ("a2", ""), ("c1", "s")):
        sequences.add(name, flags)
    running = sequences.take("X")
    sequences.queue.lose("X")
    assert [("a2", UnavailableError)] == sequences.given_up()
    sequences.queue.executed(running, 0)
    assert ([], ["b1"]) == (sequences.heads("X"), sequences.heads("Y"))
    sequences.queue.regain("X")
    sequences.queue.regain("X")
    assert ["c1"] == sequences.heads("X")
    sequences.queue.check_integrity()


def test_closing_lets_sequences_go_on_but_none_start(make):
    """Requests of sequences that have started are taken."""
    sequences = make(2, "X")
    sequences.add("a1", "s")
    sequences.queue.is_closing = True
    sequences.add("a2", "e")
    with pytest.raises(UnavailableError, match="stopped accepting new sequences"):
        sequences.add("b1", "s")


def test_iterative_requests_run_until_the_model_lets_them_go(make):
    """A request is a sequence: it keeps its slot while it is scheduled again, START only the first time."""
    sequences = make(1, "X", is_iterative=True)
    for name in ("a", "b"):
        sequences.add(name, "", sequence_id=0)
    (first,) = sequences.take("X")
    assert (1, True) == (first.call.parameters["sequence_id"], first.position.is_start)
    sequences.now_ns = 5
    sequences.queue.executed([first], sequences.now_ns, {first})
    sequences.queue.check_integrity()
    assert (["a"], 5, 0) == (sequences.heads("X"), first.enqueue_ns, first.start_ns)
    assert (False, False) == (first.position.is_start, first.call.parameters["sequence_start"])
    assert [["a"], ["b"], []] == [sequences.run("X") for _ in range(3)]
    assert 0 == sequences.queue.num_sequences


def test_iterative_requests_of_one_id_run_one_after_the_other(make):
    """The second request under an id that runs begins when the first is let go; generated ids are of nobody else."""
    sequences = make(3, "X", is_iterative=True)
    for name in ("a", "b"):
        sequences.add(name, "", sequence_id=1)
    other = sequences.add("c", "", sequence_id="")
    assert 2 == other.call.parameters["sequence_id"]
    running = sequences.take("X")
    sequences.queue.executed(running, 0, running)
    assert ["a", "c"] == sequences.run("X")
    assert ["b"] == sequences.run("X")


def test_scheduled_again_is_behind_what_waits(make):
    """A request that goes round gives way to those that came meanwhile."""
    sequences = make(2, "X", is_iterative=True)
    sequences.add("a", "")
    running = sequences.take("X")
    sequences.add("b", "")
    sequences.queue.executed(running, 0, running)
    assert ["b", "a"] == sequences.heads("X")


def test_deadline_and_cancel_reach_an_iterative_request_between_two_executions(make):
    """One whose deadline passes is given up, one that was withdrawn while it ran is not scheduled again."""
    sequences = make(2, "X", is_iterative=True)
    sequences.add("a", "", deadline_ns=10 * US)
    cancelled = sequences.add("b", "")
    running = sequences.take("X")
    sequences.queue.remove(cancelled)
    sequences.queue.executed(running, 0, running)
    sequences.queue.check_integrity()
    assert ["a"] == sequences.heads("X")
    assert [("a", DeadlineExceededError)] == sequences.given_up(11)
    assert 0 == sequences.queue.num_sequences


@pytest.mark.parametrize("num_slots", [1, 2])
def test_iterative_requests_of_one_id_leave_alone(make, num_slots):
    """One that is withdrawn, late, or waits too long for a slot takes no other of its id along, running or not."""
    sequences = make(num_slots, "X", is_iterative=True)
    requests = {name: sequences.add(name, "") for name in ("a1", "a2", "a3")}
    sequences.add("a4", "", deadline_ns=10 * US)
    sequences.add("b1", "")
    assert sequences.queue.remove(requests["a2"])
    running = sequences.take("X")
    assert not sequences.queue.remove(requests["a1"])
    sequences.queue.check_integrity()
    assert [("a4", DeadlineExceededError)] == sequences.given_up(11)
    sequences.queue.check_integrity()
    sequences.queue.executed(running, 0)
    sequences.queue.check_integrity()
    assert requests["a3"] in sequences.take("X")
    sequences.add("c1", "", timeout_us=5)
    sequences.add("c2", "")
    late = [("c1", DeadlineExceededError)] if num_slots == 1 else []
    assert late == sequences.given_up(100)
    sequences.queue.check_integrity()


def test_an_iterative_request_may_not_name_anything(make):
    """An id that is no id is refused, as for any sequence; none at all is made up."""
    sequences = make(1, "X", is_iterative=True)
    with pytest.raises(InvalidArgumentError, match="invalid value type for 'sequence_id' parameter"):
        sequences.add("a", "", sequence_id=True)
    assert 0 == sequences.queue.num_sequences


def test_a_bounded_backlog_refuses_at_the_door(make):
    """With every slot taken so many sequences wait and the next is refused; those that have started go on."""
    sequences = make(1, "X", max_backlog=1)
    sequences.add("a1", "s")
    sequences.add("b1", "s")
    with pytest.raises(ResourceExhaustedError, match="1 sequences of model 'm' wait for a slot, 1 may"):
        sequences.add("c1", "s")
    sequences.add("b2")
    sequences.add("a2", "e")
    assert [["a1"], ["a2"]] == [sequences.run("X") for _ in range(2)]
    sequences.add("c1", "s")
    assert ["b1"] == sequences.run("X")
