"""Queue and batcher, with the time in the test's hands: cases in ``timelines/``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.case_files import Case, cases, literal, literals
from tests.unit.serving.builders import make_request

from weft.base.errors import InvalidArgumentError, WeftError
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, WaitPolicy, num_to_hold
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import SlotBatcher, make_batcher

TIMELINES = Path(__file__).parent / "timelines"
US = 1000
S = 1_000_000_000
DELAY_S = 10
DELAYED = {"preferred_batch_sizes": (2, 6), "max_queue_delay_us": DELAY_S * 1_000_000}


def _settings(case_options: tuple[tuple[str, str], ...], **fields: Any) -> SchedulerSettings:
    policies: dict[Any, WaitPolicy] = {}
    for name, value in case_options:
        if name == "set":
            fields |= literals(value)
        elif name == "policy":
            level, _, policy = value.partition(" ")
            policies[literal(level)] = WaitPolicy(**literals(policy))
    default = policies.pop("*", WaitPolicy())
    settings = SchedulerSettings(
        **{"max_batch_size": 8, "is_batching": True, "policies": policies, "default_policy": default, **fields}
    )
    settings.validate("m")
    return settings


class Timeline:
    """A queue with its clock, whose requests have names."""

    def __init__(self, case: Case) -> None:
        self.queue = PriorityQueue(_settings(case.options))
        num_slots, _, instances = case.option("slots", "1 X").partition(" ")
        self.instances = list(instances)
        self.slots = SlotBatcher(self.queue, int(num_slots), self.instances)
        self.now_ns = 0
        self.requests: dict[str, InferenceRequest] = {}

    def run(self, line: str) -> Iterator[str]:
        """What the commands of a line say."""
        for command in line.split(", "):
            name, *words = command.split()
            yield from getattr(self, name)(*words) or ()
            self.queue.check_integrity()

    def at(self, time_us: str) -> None:
        self.now_ns = round(float(time_us) * US)

    def add(self, name: str, *fields: str) -> Iterator[str]:
        given = literals(" ".join(fields))
        if "deadline" in given:
            given["deadline_ns"] = given.pop("deadline") * US
        self.requests[name] = make_request(**given)
        try:
            self.queue.add(self.requests[name], self.now_ns)
        except WeftError as error:
            yield f"{name} is refused: {type(error).__name__}: {error.message}"

    def order(self) -> Iterator[str]:
        yield self._names(self.queue)

    def due(self) -> Iterator[str]:
        due_ns = self.queue.next_expiry_ns()
        yield "never" if due_ns is None else f"{due_ns / US:g} us"

    def expire(self) -> Iterator[str]:
        expired = self.queue.expire(self.now_ns)
        yield from [f"{self._names([r])} expired: {type(e).__name__}: {e.message}" for r, e in expired] or ["nobody"]

    def remove(self, name: str) -> Iterator[str]:
        yield f"{name} " + ("is removed" if self.queue.remove(self.requests[name]) else "was not there")

    def take(self, name: str) -> None:
        self.queue.take([self.requests[name]], self.now_ns)

    def before(self, *fields: str) -> Iterator[str]:
        yield f"{self.queue.num_rows_before(make_request(**literals(' '.join(fields))))} rows"

    def levels(self) -> Iterator[str]:
        yield str(self.queue.num_by_level())

    def show(self, name: str) -> Iterator[str]:
        request = self.requests[name]
        came = f"level {request.priority}, came at {request.enqueue_ns / US:g} us as no. {request.sequence}"
        times = f"timeout {request.queue_timeout_us} us, begins at {request.start_ns / US:g} us"
        yield f"{name}: {came} behind {request.num_queued_at_arrival}, {times}"

    def enter(self) -> Iterator[str]:
        requests, _, instance = self.slots.next_batch(self.queue, self.now_ns)
        self.queue.take(requests, self.now_ns)
        self.slots.enter(requests, instance)
        yield f"{self._names(requests)} into {instance}"

    def leave(self, name: str) -> Iterator[str]:
        yield f"{name} " + ("leaves" if self.slots.leave(self.requests[name]) else "was not inside")

    def inside(self) -> Iterator[str]:
        yield f"{len(self.slots)} inside"

    def idle(self, instances: str = "") -> None:
        self.instances[:] = instances

    def _names(self, requests: Any) -> str:
        names = {request: name for name, request in self.requests.items()}
        return " ".join(names[request] for request in requests) or "nobody"


@cases(TIMELINES / "priorities.txt")
def test_timeline(case: Case) -> None:
    """Requests that come, wait, expire, enter and leave do so as the case says."""
    case.check_script(Timeline(case).run)


@cases(TIMELINES / "batches.txt")
def test_batches(case: Case) -> None:
    """Arrivals lead to these executions."""
    settings = _settings(case.options, **DELAYED)
    buckets = case.option("buckets")
    of_length = LengthBuckets(pad_values={"X": 0}, **literals(buckets)) if buckets else None
    queue, batcher = (
        PriorityQueue(settings),
        make_batcher(settings, of_length, num_to_hold=int(case.option("hold", "0"))),
    )
    pending = [line.partition(":") for line in case.text.split("\n")]
    executions, now_ns = [], 0
    while True:
        while pending and int(pending[0][0]) * S <= now_ns:
            words = pending.pop(0)[2].split()
            key = literals(" ".join(word for word in words if "=" in word)).get("key")
            for rows in words:
                if rows.isdigit():
                    queue.add(make_request(int(rows), key=key), now_ns)
        requests, wait_until_ns, _ = batcher.next_batch(queue, now_ns)
        if requests:
            queue.take(requests, now_ns)
            executions.append(f"{now_ns / S:g}: " + " ".join(str(request.num_rows) for request in requests))
            continue
        assert wait_until_ns is None or wait_until_ns > now_ns
        times = [time for time in (wait_until_ns, int(pending[0][0]) * S if pending else None) if time is not None]
        if not times:
            break
        now_ns = min(times)
    case.check("\n".join(executions or ["never"]))


def test_levels_that_clients_no_longer_use_do_not_pile_up() -> None:
    """Levels are made when used."""
    queue = PriorityQueue(SchedulerSettings(8, priority_levels=2**64 - 1, default_priority_level=1))
    for level in range(1000, 2000):
        queue.add(request := make_request(priority=level), 0)
        queue.remove(request)
    assert len(queue._levels) < 50
    queue.check_integrity()


def test_stale_expiries_are_swept() -> None:
    """Requests that were served long before their deadline leave nothing behind."""
    queue = PriorityQueue(SchedulerSettings(8))
    for _ in range(1000):
        queue.add(request := make_request(deadline_ns=10**12), 0)
        queue.remove(request)
    assert len(queue._expiries) < 100
    assert None is queue.next_expiry_ns()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_batch_size": -1}, "max_batch_size: must be at least 0, got -1"),
        ({"max_queue_delay_us": -5}, "max_queue_delay_microseconds: must be at least 0, got -5"),
        ({"default_policy": WaitPolicy("DROP")}, "must be REJECT or DELAY, got 'DROP'"),
        ({"default_policy": WaitPolicy(max_queue_size=-1)}, "must be at least 0"),
        ({"preferred_batch_sizes": (9,), "max_queue_delay_us": -5}, r"got -5; .*got 9"),
    ],
)
def test_settings_that_no_configuration_can_have_are_refused_too(settings: dict[str, Any], text: str) -> None:
    """Every fault is named, with the model, the field, the value got and the values allowed."""
    with pytest.raises(InvalidArgumentError, match=f"^model 'm': .*{text}"):
        SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}).validate("m")


def test_settings_of_a_model_without_batching_are_not_looked_at() -> None:
    """As in Triton Inference Server."""
    SchedulerSettings(8, preferred_batch_sizes=(99,)).validate("m")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, 0),
        ({"WEFT_DELAY_SCHEDULER": ""}, 0),
        ({"WEFT_DELAY_SCHEDULER": "6"}, 6),
        ({"TRITONSERVER_DELAY_SCHEDULER": "4"}, 4),
        ({"WEFT_DELAY_SCHEDULER": "6", "TRITONSERVER_DELAY_SCHEDULER": "4"}, 6),
    ],
)
def test_num_to_hold(environment: dict[str, str], expected: int) -> None:
    """Either environment variable holds batches back; neither does by default."""
    assert expected == num_to_hold(environment)


@pytest.mark.parametrize("value", ["six", "-1", "1.5"])
def test_num_to_hold_must_be_a_number(value: str) -> None:
    """A value that is no whole number is refused, with the name of the variable."""
    with pytest.raises(InvalidArgumentError, match="WEFT_DELAY_SCHEDULER must be a whole number"):
        num_to_hold({"WEFT_DELAY_SCHEDULER": value})


def _with_batcher(num_to_hold: int = 0, buckets: LengthBuckets | None = None, **settings: Any) -> tuple[Any, Any]:
    scheduling = _settings((), **{**DELAYED, **settings})
    return PriorityQueue(scheduling), make_batcher(scheduling, buckets, num_to_hold=num_to_hold)


def test_late_batch_takes_all_that_fits() -> None:
    """Once the oldest waited for the delay, preferred sizes no longer matter."""
    queue, batcher = _with_batcher()
    for _ in range(9):
        queue.add(make_request(), 0)
    assert 6 == len(batcher.next_batch(queue, 0).requests)
    assert 8 == len(batcher.next_batch(queue, DELAY_S * S).requests)


def test_batch_mixes_levels() -> None:
    """Level 1 comes first in a batch, and lower levels fill the rest; the delay counts from the oldest of them."""
    queue, batcher = _with_batcher(priority_levels=2, default_priority_level=2, preferred_batch_sizes=())
    low, high = make_request(2), make_request(2, priority=1)
    queue.add(low, 0)
    queue.add(high, 5 * S)
    assert DELAY_S * S == batcher.next_batch(queue, 5 * S).wait_until_ns
    assert [high, low] == batcher.next_batch(queue, DELAY_S * S).requests


def test_delayed_request_is_late() -> None:
    """A request that its policy put back does not wait for a delay again."""
    queue, batcher = _with_batcher(default_policy=WaitPolicy("DELAY", DELAY_S * 1_000_000))
    old, new = make_request(), make_request(3)
    queue.add(old, 0)
    queue.expire(DELAY_S * S)
    queue.add(new, DELAY_S * S)
    assert [new, old] == batcher.next_batch(queue, DELAY_S * S).requests


def test_draining_does_not_wait() -> None:
    """With ``may_wait=False`` neither delay nor hold keeps a request back."""
    queue, batcher = _with_batcher(num_to_hold=4)
    queue.add(make_request(3), 0)
    assert ([], None, None) == batcher.next_batch(queue, 0)
    assert 1 == len(batcher.next_batch(queue, 0, may_wait=False).requests)


@pytest.mark.parametrize(
    ("deadline_s", "expected_s", "send_s"),
    [
        pytest.param(None, 2, 10, id="without a deadline the whole delay"),
        pytest.param(60, 2, 10, id="a far deadline changes nothing"),
        pytest.param(9, 2, 5, id="twice the measured time is left for the execution"),
        pytest.param(9, 0, 4.5, id="half of what is left, where nothing was measured"),
        pytest.param(3, 2, 0, id="not before its arrival"),
    ],
)
def test_deadline_shortens_the_delay(deadline_s: int | None, expected_s: int, send_s: float) -> None:
    """A request that is close to its deadline, and what is in its batch, is not held back for others."""
    queue, batcher = _with_batcher()
    queue.add(make_request(), 0)
    hurried = make_request(2, deadline_ns=deadline_s and deadline_s * S)
    hurried.expected_ns = expected_s * S
    queue.add(hurried, 0)
    send_ns = int(send_s * S)
    assert send_ns == (batcher.next_batch(queue, 0).wait_until_ns or 0)
    assert 2 == len(batcher.next_batch(queue, send_ns).requests)


def test_bucket_batches_are_found_among_many() -> None:
    """A long queue is not walked to its end."""
    queue, batcher = _with_batcher(
        buckets=LengthBuckets((16, 32), {"X": 0}), preferred_batch_sizes=(), max_queue_delay_us=0
    )
    for number in range(1100):
        queue.add(make_request(key=0 if number in (0, 1023, 1024) else number), 0)
    assert [0, 1023] == [request.sequence for request in batcher.next_batch(queue, 0).requests]


def test_so_many_enter_at_once() -> None:
    """A long row does not keep the instance from looking at who comes."""
    queue = PriorityQueue(_settings((), max_batch_size=0))
    slots = SlotBatcher(queue, 100, ["X"])
    for _ in range(40):
        queue.add(make_request(), 0)
    sizes = []
    for _ in range(3):
        requests, _, instance = slots.next_batch(queue, 0)
        queue.take(requests, 0)
        slots.enter(requests, instance)
        sizes.append(len(requests))
    assert [16, 16, 8] == sizes
