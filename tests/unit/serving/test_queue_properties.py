"""The priority queue against a plain model of it, with operations at random."""

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weft.base.core import CallContext, InferCall
from weft.base.errors import DeadlineExceededError, ResourceExhaustedError
from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings, WaitPolicy
from weft.serving.request.request import InferenceRequest

LEVELS = 3
POLICIES = st.builds(
    WaitPolicy,
    timeout_action=st.sampled_from(["REJECT", "DELAY"]),
    default_timeout_us=st.sampled_from([0, 3, 10]),
    allow_timeout_override=st.booleans(),
    max_queue_size=st.sampled_from([0, 4]),
)


class QueueMachine(RuleBasedStateMachine):
    """Nothing is lost, nothing leaves twice, and the order is that of level, punctuality and arrival."""

    @initialize(policies=st.dictionaries(st.integers(1, LEVELS), POLICIES), default=POLICIES)
    def start(self, policies, default):
        self.policies = {level: policies.get(level, default) for level in range(1, LEVELS + 1)}
        self.queue = PriorityQueue(
            SchedulerSettings(
                8,
                is_batching=True,
                priority_levels=LEVELS,
                default_priority_level=2,
                default_policy=default,
                policies=policies,
            )
        )
        self.now_ns = 1
        self.waiting = {}  # request: (level, in time or delayed, order within that)
        self.num_ordered = 0
        self.accepted = set()
        self.left = []

    def order(self):
        self.num_ordered += 1
        return self.num_ordered

    @rule(
        priority=st.integers(0, LEVELS + 1),
        timeout_us=st.sampled_from([0, 1, 5]),
        deadline_us=st.sampled_from([None, 0, 2, 8]),
        rows=st.integers(1, 8),
    )
    def add(self, priority, timeout_us, deadline_us, rows):
        deadline_ns = None if deadline_us is None else self.now_ns + deadline_us * 1000
        request = InferenceRequest(InferCall("m"), CallContext(deadline_ns=deadline_ns), rows, priority, timeout_us)
        level = priority if 1 <= priority <= LEVELS else 2
        limit = self.policies[level].max_queue_size
        num_level = sum(place[0] == level for place in self.waiting.values())
        try:
            self.queue.add(request, self.now_ns)
        except ResourceExhaustedError:
            assert limit
            assert limit == num_level
        except DeadlineExceededError:
            assert 0 == deadline_us
        else:
            assert not limit or num_level < limit
            assert 0 != deadline_us
            self.accepted.add(request)
            self.waiting[request] = (level, 0, self.order())

    @rule(data=st.data())
    def cancel(self, data):
        if self.accepted:
            request = data.draw(st.sampled_from(sorted(self.accepted, key=lambda r: r.sequence)))
            assert (request in self.waiting) == self.queue.remove(request)
            if self.waiting.pop(request, None):
                self.left.append(request)

    @rule(count=st.integers(1, 4))
    def take(self, count):
        batch = [request for _, request in zip(range(count), self.queue, strict=False)]
        self.queue.take(batch, self.now_ns)
        for request in batch:
            del self.waiting[request]
            self.left.append(request)

    @rule(step_us=st.integers(0, 6))
    def expire(self, step_us):
        self.now_ns += step_us * 1000
        due = self.queue.next_expiry_ns()
        expired = [expired.request for expired in self.queue.expire(self.now_ns)]
        assert not expired or due <= self.now_ns
        timeouts = []
        for request, (level, lateness, _) in list(self.waiting.items()):
            timeout_ns = request.enqueue_ns + request.queue_timeout_us * 1000
            is_late = 0 < request.queue_timeout_us and timeout_ns <= self.now_ns
            deadline_ns = request.context.deadline_ns
            is_dead = deadline_ns is not None and deadline_ns <= self.now_ns
            if is_dead or (is_late and self.policies[level].timeout_action == "REJECT"):
                assert request in expired
                del self.waiting[request]
                self.left.append(request)
            else:
                assert request not in expired
                if is_late and not lateness:
                    timeouts.append((timeout_ns, request.sequence, request))
        for _, _, request in sorted(timeouts):
            self.waiting[request] = (request.priority, 1, self.order())

    @invariant()
    def same_order(self):
        expected = sorted(self.waiting, key=lambda request: self.waiting[request])
        assert expected == list(self.queue)

    @invariant()
    def nothing_lost_or_answered_twice(self):
        assert len(self.left) == len(set(self.left))
        assert self.accepted == set(self.left) | set(self.waiting)
        assert not set(self.left) & set(self.waiting)

    @invariant()
    def integrity(self):
        self.queue.check_integrity()


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestQueue.__doc__ = QueueMachine.__doc__
