"""Who enters a backend that works on many requests at once: priorities, ageing, several instances."""

from tests.unit.serving.builders import make_request

from weft.serving.queues.priority_levels import PriorityQueue
from weft.serving.queues.settings import SchedulerSettings
from weft.serving.scheduler.batcher import SlotBatcher

MS = 1_000_000
LEVELS = SchedulerSettings(max_batch_size=0, is_batching=True, priority_levels=3, default_priority_level=2)


class House:
    """A queue before some instances with slots."""

    def __init__(self, num_slots=2, instances=("a",), settings=LEVELS):
        self.queue = PriorityQueue(settings)
        self.slots = SlotBatcher(self.queue, num_slots, instances)
        self.name_of = {}

    def come(self, name, priority=2, now_ns=0):
        request = make_request(priority=priority)
        self.name_of[request] = name
        self.queue.add(request, now_ns)
        return request

    def enter(self, *, may_wait=True):
        """Names of those that enter now, and the instance."""
        requests, _, instance = self.slots.next_batch(self.queue, 0, may_wait=may_wait)
        self.queue.take(requests, 0)
        self.slots.enter(requests, instance)
        return [self.name_of[request] for request in requests], instance


def test_as_many_enter_as_there_are_slots():
    """The others wait, in order, until somebody leaves; one that leaves twice, or never entered, frees nothing."""
    there = House(2)
    first, *_ = [there.come(name) for name in "abcd"]
    assert ["a", "b"] == there.enter()[0]
    assert [] == there.enter()[0]
    assert not there.slots.leave(there.come("e"))
    assert (True, False) == (there.slots.leave(first), there.slots.leave(first))
    assert ["c"] == there.enter()[0]
    assert 2 == len(there.slots)


def test_a_better_level_enters_a_full_instance():
    """As many of each level as there are slots, and no more; a worse level waits for all of them."""
    there = House(2)
    for name in ("low1", "low2", "low3"):
        there.come(name, 3)
    assert ["low1", "low2"] == there.enter()[0]
    for name in ("high1", "high2", "high3"):
        there.come(name, 1)
    assert ["high1", "high2"] == there.enter()[0]
    there.come("middle", 2)
    assert [] == there.enter()[0]
    assert 4 == len(there.slots)


def test_a_slot_that_a_worse_one_leaves_is_no_slot_while_better_ones_fill_all():
    """The slots count from the best downwards: what was put aside in the engine goes on before a newcomer."""
    there = House(2)
    low = [there.come(f"low{i}", 3) for i in (1, 2)]
    there.enter()
    high = [there.come(f"high{i}", 1) for i in (1, 2)]
    there.enter()
    there.come("low3", 3)
    there.slots.leave(low[0])
    assert [] == there.enter()[0]
    there.slots.leave(high[0])
    assert [] == there.enter()[0]
    there.slots.leave(high[1])
    assert ["low3"] == there.enter()[0]


def test_with_ageing_a_whole_step_ahead_is_better():
    """A newcomer overtakes only where it would have waited a whole `priority_aging_us` less."""
    settings = SchedulerSettings(
        0, is_batching=True, priority_levels=3, default_priority_level=2, priority_aging_us=1000
    )
    there = House(1, settings=settings)
    there.come("old", 2, now_ns=0)
    assert ["old"] == there.enter()[0]
    late = there.come("late", 1, now_ns=1)  # a level better and 1 ns later: not a whole step
    assert [] == there.enter()[0]
    there.queue.remove(late)
    there.come("early", 1, now_ns=0)
    assert ["early"] == there.enter()[0]


def test_the_emptiest_idle_instance_is_next():
    """One request at a time, so that several instances share what came together; a busy one is left out."""
    idle = ["a", "b"]
    there = House(2, instances=idle)
    for name in "123456":
        there.come(name)
    assert [(["1"], "a"), (["2"], "b"), (["3"], "a")] == [there.enter() for _ in range(3)]
    idle.remove("a")
    assert [(["4"], "b"), ([], "b")] == [there.enter() for _ in range(2)]
    idle.clear()
    assert ([], None) == there.enter()


def test_so_many_enter_at_once():
    """A long row does not keep the instance from looking at who comes."""
    there = House(100)
    for number in range(40):
        there.come(number)
    assert [16, 16, 8] == [len(there.enter()[0]) for _ in range(3)]
