"""The priority queue, with the time in the test's hands."""

import pytest
from tests.unit.serving.builders import make_request

from weft.base.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from weft.base.statistics import MAX_COUNTED_LEVEL
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy, num_to_hold

US = 1000


def _queue(**settings):
    return PriorityQueue(SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}))


def _policy(**fields):
    return _queue(default_policy=WaitPolicy(**fields))


def _add(queue, *requests, now_ns=0):
    for request in requests:
        queue.add(request, now_ns)
    return requests


def test_first_in_first_out():
    """Without levels, requests are served in the order of arrival, whatever their priority."""
    queue = _queue()
    requests = _add(queue, make_request(), make_request(priority=3), make_request(priority=1))
    assert list(requests) == list(queue)
    assert [0, 0, 0] == [request.priority for request in queue]


def test_levels_are_strict_and_fifo():
    """Level 1 is served before level 2, and within a level the first in is the first out."""
    queue = _queue(priority_levels=3, default_priority_level=2)
    a, b, c, d = _add(queue, *(make_request(priority=level) for level in (3, 1, 2, 1)))
    assert [b, d, c, a] == list(queue)


@pytest.mark.parametrize("priority", [0, 4, 2**64 - 1])
def test_unknown_priority_is_the_default_level(priority):
    """A request without priority, or with one beyond the levels, waits in the default level."""
    queue = _queue(priority_levels=3, default_priority_level=2)
    (request,) = _add(queue, make_request(priority=priority))
    assert 2 == request.priority


def test_levels_are_made_when_used():
    """2**64 - 1 levels cost nothing, and levels that clients no longer use do not pile up."""
    queue = _queue(priority_levels=2**64 - 1, default_priority_level=1)
    last, first = _add(queue, make_request(priority=2**64 - 1), make_request(priority=5))
    assert [first, last] == list(queue)
    for level in range(1000, 2000):
        queue.remove(*_add(queue, make_request(priority=level)))
    assert [first, last] == list(queue)
    assert len(queue._levels) < 50
    queue.check_integrity()


def test_remove_is_exact():
    """A removed request is gone, the rest keeps its order, and removing it again changes nothing."""
    queue = _queue()
    a, b, c = _add(queue, make_request(2), make_request(3), make_request(4))
    assert queue.remove(b)
    assert not queue.remove(b)
    assert ([a, c], 2, 6) == (list(queue), len(queue), queue.num_rows_before(make_request()))


def test_take_stamps_the_start():
    """Taken requests leave the queue and know when."""
    queue = _queue()
    a, b = _add(queue, make_request(), make_request())
    queue.take([a], 70)
    assert ([b], 70, 0) == (list(queue), a.start_ns, b.start_ns)


def test_arrival_is_recorded():
    """A request knows when it came and how many were queued then."""
    queue = _queue()
    a, b = _add(queue, make_request(), make_request(), now_ns=42)
    assert [(42, 0, 0), (42, 1, 1)] == [(r.enqueue_ns, r.num_queued_at_arrival, r.sequence) for r in (a, b)]


def test_timeout_rejects():
    """With REJECT a request leaves at its timeout, not before, with the text that clients look for."""
    queue = _policy(default_timeout_us=10)
    (request,) = _add(queue, make_request(), now_ns=5)
    assert 5 + 10 * US == queue.next_expiry_ns()
    assert [] == queue.expire(5 + 10 * US - 1)
    ((expired, error),) = queue.expire(5 + 10 * US)
    assert expired is request
    assert isinstance(error, DeadlineExceededError)
    assert "Request timeout expired" == error.message
    assert (0, None) == (len(queue), queue.next_expiry_ns())


def test_timeout_delays():
    """With DELAY a request moves behind those of its level that are in time, before the next level, and stays."""
    queue = _queue(
        priority_levels=2, default_priority_level=1, policies={1: WaitPolicy("DELAY", default_timeout_us=10)}
    )
    low = make_request(priority=2)
    early, late = make_request(), make_request()
    _add(queue, low, early)
    _add(queue, late, now_ns=5 * US)
    assert [early, late, low] == list(queue)
    assert [] == queue.expire(10 * US)
    assert [late, early, low] == list(queue)
    assert [] == queue.expire(20 * US)
    assert [early, late, low] == list(queue)
    assert None is queue.next_expiry_ns()
    assert queue.remove(early)
    queue.check_integrity()


def test_delayed_request_still_has_a_deadline():
    """A request that DELAY keeps is given up at its deadline."""
    queue = _policy(timeout_action="DELAY", default_timeout_us=10)
    (request,) = _add(queue, make_request(deadline_ns=30 * US))
    assert [] == queue.expire(10 * US)
    assert 30 * US == queue.next_expiry_ns()
    assert [request] == [expired.request for expired in queue.expire(30 * US)]
    assert 0 == len(queue)


@pytest.mark.parametrize(
    ("default_us", "may_override", "asked_us", "expected_us"),
    [
        (100, True, 40, 40),
        (100, True, 0, 100),
        (100, True, 100, 100),
        (100, True, 200, 100),
        (100, False, 40, 100),
        (0, True, 40, 0),
        (0, False, 40, 0),
    ],
)
def test_timeout_override(default_us, may_override, asked_us, expected_us):
    """A request may shorten the default timeout where that is allowed, never lengthen it or make one up."""
    queue = _policy(default_timeout_us=default_us, allow_timeout_override=may_override)
    (request,) = _add(queue, make_request(timeout_us=asked_us))
    assert expected_us == request.queue_timeout_us
    assert (expected_us * US or None) == queue.next_expiry_ns()


def test_deadline_expires_in_the_queue():
    """A request's own deadline takes it out, also before its queue timeout, and the others stay."""
    queue = _policy(default_timeout_us=1000)
    a, b = _add(queue, make_request(), make_request(deadline_ns=50), now_ns=1)
    ((expired, error),) = queue.expire(50)
    assert expired is b
    assert isinstance(error, DeadlineExceededError)
    assert [a] == list(queue)


def test_passed_deadline_is_refused():
    """A request whose deadline has passed does not enter the queue."""
    queue = _queue()
    with pytest.raises(DeadlineExceededError):
        queue.add(make_request(deadline_ns=9), 9)
    assert 0 == len(queue)


def test_expired_come_in_order_of_expiry():
    """What expires together is returned in the order of expiry."""
    queue = _queue()
    requests = _add(queue, *(make_request(deadline_ns=time) for time in (30, 10, 20, 99)))
    assert [requests[1], requests[2], requests[0]] == [expired.request for expired in queue.expire(50)]


def test_max_queue_size_counts_one_level():
    """A full level refuses with the limit in the text; other levels, and the same one after a removal, accept."""
    queue = _queue(priority_levels=2, default_priority_level=2, policies={1: WaitPolicy("DELAY", 10, max_queue_size=2)})
    first, _ = _add(queue, make_request(priority=1), make_request(5, priority=1))
    queue.expire(10 * US)  # delayed requests count too
    with pytest.raises(ResourceExhaustedError, match="Exceeds maximum queue size: 2 requests wait at priority level 1"):
        queue.add(make_request(priority=1), 0)
    assert (2, 6) == (len(queue), queue.num_rows_before(make_request(priority=1)))
    _add(queue, make_request(priority=2))
    queue.remove(first)
    _add(queue, make_request(priority=1))
    assert 3 == len(queue)


def test_ageing_lets_old_requests_pass():
    """With ageing a level is worth a time of arrival: level 3 is served as level 1 that came two steps later."""
    queue = _queue(priority_levels=3, default_priority_level=2, priority_aging_us=10)
    (low,) = _add(queue, make_request(priority=3))
    early, middle = _add(queue, make_request(priority=1), make_request(priority=2), now_ns=19 * US)
    (late,) = _add(queue, make_request(priority=1), now_ns=21 * US)
    assert [early, low, late, middle] == list(queue)


def test_ageing_ends_in_the_better_level():
    """Of two requests that have come to be worth the same, that of the better level is first."""
    queue = _queue(priority_levels=2, default_priority_level=2, priority_aging_us=10)
    (low,) = _add(queue, make_request(priority=2))
    (high,) = _add(queue, make_request(priority=1), now_ns=10 * US)
    assert [high, low] == list(queue)


def test_delayed_requests_age():
    """A request that DELAY put back counts as one of the next level that came then, so it does not starve."""
    queue = _queue(
        priority_levels=2, default_priority_level=1, priority_aging_us=10, default_policy=WaitPolicy("DELAY", 5)
    )
    (old,) = _add(queue, make_request())
    assert [] == queue.expire(5 * US)
    (same,) = _add(queue, make_request(), now_ns=14 * US)
    assert [same, old] == list(queue)
    (newer,) = _add(queue, make_request(), now_ns=16 * US)
    assert [same, old, newer] == list(queue)


def test_rows_before():
    """A new request waits for the rows of its level and of better ones, delayed ones included."""
    queue = _queue(priority_levels=3, default_priority_level=2, policies={1: WaitPolicy("DELAY", 5)})
    first, *_ = _add(queue, *(make_request(rows, priority=level) for rows, level in ((1, 1), (2, 2), (4, 3))))
    queue.expire(5 * US)
    assert [1, 3, 7] == [queue.num_rows_before(make_request(priority=level)) for level in (1, 2, 3)]
    queue.remove(first)
    assert [0, 2, 6] == [queue.num_rows_before(make_request(priority=level)) for level in (1, 2, 3)]


def test_count_by_level():
    """Waiting requests are counted by level, and the countless levels that clients may choose are counted as one."""
    queue = _queue(priority_levels=2**64 - 1, default_priority_level=1)
    first, *_ = _add(queue, *(make_request(priority=level) for level in (0, 1, 2, 10**6, 2**63)))
    queue.remove(first)
    assert {1: 1, 2: 1, MAX_COUNTED_LEVEL: 2} == queue.num_by_level()


def test_stale_expiries_are_swept():
    """Requests that were served long before their deadline leave nothing behind."""
    queue = _queue()
    for _ in range(1000):
        queue.remove(*_add(queue, make_request(deadline_ns=10**12)))
    assert len(queue._expiries) < 100
    assert None is queue.next_expiry_ns()


DELAY = WaitPolicy("DELAY", default_timeout_us=5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"max_batch_size": -1}, "max_batch_size: must be at least 0, got -1"),
        ({"preferred_batch_sizes": (2, 9)}, r"must be in 1..max_batch_size \(8\), got 9"),
        ({"preferred_batch_sizes": (0,)}, "got 0"),
        ({"max_queue_delay_us": -5}, "max_queue_delay_microseconds: must be at least 0, got -5"),
        ({"priority_levels": 3}, r"default priority level must be provided and in range \[1, 3\], got 0"),
        ({"priority_levels": 3, "default_priority_level": 4}, r"in range \[1, 3\], got 4"),
        (
            {"priority_levels": 3, "default_priority_level": 1, "policies": {4: WaitPolicy()}},
            r"priority level must be in range \[1, 3\], got 4",
        ),
        ({"policies": {1: WaitPolicy()}}, "needs priority_levels > 0, got 1"),
        (
            {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1},
            "Only one priority level is allowed when 'preserve_ordering' is true, got 2",
        ),
        ({"preserve_ordering": True, "default_policy": DELAY}, "can not have DELAY as timeout action"),
        (
            {
                "preserve_ordering": True,
                "priority_levels": 1,
                "default_priority_level": 1,
                "policies": {1: DELAY},
            },
            r"priority_queue_policy\[1\]: Queue policy can not have DELAY",
        ),
        ({"default_policy": WaitPolicy("DROP")}, "must be REJECT or DELAY, got 'DROP'"),
        ({"default_policy": WaitPolicy(max_queue_size=-1)}, "must be at least 0"),
    ],
)
def test_faults_are_refused(settings, text):
    """Settings that cannot be served are refused, with the model, the field, the value got and the values allowed."""
    with pytest.raises(InvalidArgumentError, match=text) as raised:
        SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}).validate("m")
    assert raised.value.message.startswith("model 'm': ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"preferred_batch_sizes": (1, 8), "max_queue_delay_us": 100},
        {"preserve_ordering": True, "priority_levels": 1, "default_priority_level": 1},
        {"preserve_ordering": True, "default_policy": WaitPolicy("DELAY")},
        {"priority_levels": 2**64 - 1, "default_priority_level": 1, "policies": {2**64 - 1: DELAY}},
        {"is_batching": False, "preferred_batch_sizes": (99,)},
    ],
)
def test_legal_settings_pass(settings):
    """What Triton Inference Server accepts is accepted."""
    SchedulerSettings(**{"max_batch_size": 8, "is_batching": True, **settings}).validate("m")


def test_every_fault_is_named():
    """Two faults are told at once."""
    with pytest.raises(InvalidArgumentError, match=r"got -5; .*got 9"):
        SchedulerSettings(8, is_batching=True, preferred_batch_sizes=(9,), max_queue_delay_us=-5).validate("m")


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
def test_num_to_hold(environment, expected):
    """Either environment variable holds batches back; neither does by default."""
    assert expected == num_to_hold(environment)


@pytest.mark.parametrize("value", ["six", "-1", "1.5"])
def test_num_to_hold_must_be_a_number(value):
    """A value that is no whole number is refused, with the name of the variable."""
    with pytest.raises(InvalidArgumentError, match="WEFT_DELAY_SCHEDULER must be a whole number"):
        num_to_hold({"WEFT_DELAY_SCHEDULER": value})
