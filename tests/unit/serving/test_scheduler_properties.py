"""Queue and batcher together, with arrivals, cancels, timeouts and free instances at random."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.base.core import CallContext, InferCall
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import LengthBuckets, SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceRequest
from weft.serving.scheduler.batcher import make_batcher

LEVELS = 3
MAX_ROWS = 8
MAX_ELEMENTS = 64
US = 1000


class SchedulerMachine(RuleBasedStateMachine):
    """Every request has exactly one end; batches are bounded, uniform and in order; nobody is held beyond the delay."""

    @initialize(
        preferred=st.sets(st.integers(1, MAX_ROWS), max_size=2),
        delay_us=st.sampled_from([0, 5, 20]),
        aging_us=st.sampled_from([0, 0, 3, 10]),
        policy=st.builds(
            WaitPolicy,
            timeout_action=st.sampled_from(["REJECT", "DELAY"]),
            default_timeout_us=st.sampled_from([0, 4, 12]),
            allow_timeout_override=st.booleans(),
            max_queue_size=st.sampled_from([0, 3]),
        ),
        buckets=st.sampled_from([None, LengthBuckets((16, 32), {"X": 0}, max_elements=MAX_ELEMENTS)]),
    )
    def start(self, preferred, delay_us, aging_us, policy, buckets):
        self.settings = SchedulerSettings(
            MAX_ROWS,
            is_batching=True,
            preferred_batch_sizes=tuple(preferred),
            max_queue_delay_us=delay_us,
            priority_levels=LEVELS,
            default_priority_level=2,
            default_policy=policy,
            priority_aging_us=aging_us,
        )
        self.buckets = buckets
        self.queue = PriorityQueue(self.settings)
        self.batcher = make_batcher(self.settings, buckets)
        self.now_ns = 1
        self.accepted = []
        self.ended = []
        self.executed = []

    @rule(
        priority=st.integers(0, LEVELS + 1),
        timeout_us=st.sampled_from([0, 1, 6]),
        deadline_us=st.sampled_from([None, None, 3, 30]),
        expected_us=st.sampled_from([0, 1, 8]),
        rows=st.integers(1, MAX_ROWS),
        key=st.sampled_from([16, 32]),
    )
    def arrive(self, priority, timeout_us, deadline_us, expected_us, rows, key):
        deadline_ns = None if deadline_us is None else self.now_ns + deadline_us * US
        request = InferenceRequest(
            InferCall("m"),
            CallContext(deadline_ns=deadline_ns),
            rows,
            priority,
            timeout_us,
            batch_key=key,
            expected_ns=expected_us * US,
        )
        try:
            self.queue.add(request, self.now_ns)
        except (ResourceExhaustedError, DeadlineExceededError):
            return
        self.accepted.append(request)

    @precondition(lambda self: len(self.queue))  # type: ignore[arg-type, return-value]
    @rule(data=st.data())
    def cancel(self, data):
        request = data.draw(st.sampled_from(list(self.queue)))
        assert self.queue.remove(request)
        assert not self.queue.remove(request)
        self.ended.append(request)

    @rule(step_us=st.integers(1, 8))
    def wait(self, step_us):
        self.now_ns += step_us * US
        self.expire()

    @rule(may_wait=st.booleans())
    def free_instance(self, may_wait):
        self.expire()
        order = list(self.queue)
        decision = self.batcher.next_batch(self.queue, self.now_ns, may_wait=may_wait)
        assert order == list(self.queue)
        batch = decision.requests
        if batch:
            self.check_batch(batch, order)
            self.queue.take(batch, self.now_ns)
            self.ended += batch
            self.executed += batch
        elif order:
            assert may_wait
            assert self.settings.max_queue_delay_us
            delay_ns = self.settings.max_queue_delay_us * US
            assert self.now_ns < decision.wait_until_ns <= min(request.enqueue_ns for request in order[:1]) + delay_ns
        else:
            assert decision.wait_until_ns is None

    def check_batch(self, batch, order):
        (key,) = {request.batch_key for request in batch}
        num_rows = sum(request.num_rows for request in batch)
        limit = MAX_ROWS if self.buckets is None else self.buckets.max_rows(key, MAX_ROWS)
        assert len(batch) == 1 or num_rows <= limit
        line = order if self.buckets is None else [request for request in order if request.batch_key == key]
        assert batch == line[: len(batch)]

    def expire(self):
        self.ended += [expired.request for expired in self.queue.expire(self.now_ns)]

    @invariant()
    def every_request_has_one_end(self):
        if hasattr(self, "queue"):
            assert len(self.ended) == len(set(self.ended))
            assert set(self.accepted) == set(self.ended) | set(self.queue)
            assert not set(self.ended) & set(self.queue)
            self.queue.check_integrity()

    @invariant()
    def order_of_service(self):
        if not hasattr(self, "queue"):
            return
        order = list(self.queue)
        if self.settings.priority_aging_us:
            assert order == sorted(order, key=lambda request: request.rank_ns)
        else:
            assert order == sorted(order, key=lambda request: request.priority)
        if self.settings.default_policy.timeout_action == "REJECT":
            for level in range(1, LEVELS + 1):
                arrivals = [request.sequence for request in order if request.priority == level]
                assert arrivals == sorted(arrivals)

    def teardown(self):
        """Left alone with an instance that is always free, everything ends."""
        if not hasattr(self, "queue"):
            return
        for _ in range(10 * len(self.accepted) + 10):
            self.free_instance(may_wait=True)
            times = [
                time
                for time in (
                    self.queue.next_expiry_ns(),
                    self.batcher.next_batch(self.queue, self.now_ns).wait_until_ns,
                )
                if time is not None
            ]
            if self.queue and times:
                self.now_ns = max(self.now_ns, min(times))
        assert not self.queue
        super().teardown()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestScheduler.__doc__ = SchedulerMachine.__doc__
