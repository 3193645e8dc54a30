"""When a replica is left out, for how long, and how many may be at once."""

import pytest

from weft.router.targets.ejection import BASE_S, CREDIT_S, MAX_S, MIN_CALLS, WINDOW_S, OutlierDetector, Record


class World:
    """A detector with some replicas, on a clock that the test turns."""

    def __init__(self, num_replicas: int = 4) -> None:
        self.now_ns = 1_000_000_000
        self.detector = OutlierDetector(lambda: self.now_ns)
        self.replicas = [self.detector.join() for _ in range(num_replicas)]
        self.detector.note(self.replicas[-1], "OK")

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def note(self, record: Record, status: str, count: int = 1) -> bool:
        return sum(self.detector.note(record, status) for _ in range(count)) > 0

    def ejected(self) -> list[int]:
        return [i for i, record in enumerate(self.replicas) if self.detector.is_ejected(record)]


@pytest.mark.parametrize("status", ["UNAVAILABLE", "DEADLINE_EXCEEDED"])
def test_calls_lost_in_a_row_eject(status: str) -> None:
    """The fifth does; the ejection is told once."""
    world = World()
    assert not world.note(world.replicas[0], status, 4)
    assert world.note(world.replicas[0], status)
    assert [0] == world.ejected()
    assert not world.note(world.replicas[0], status)


@pytest.mark.parametrize("status", ["OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL"])
def test_an_answer_ends_the_row(status: str) -> None:
    """Any: the replica is there. A refusal for overload says nothing against it either."""
    world = World()
    world.note(world.replicas[0], "UNAVAILABLE", 4)
    world.note(world.replicas[0], status)
    world.note(world.replicas[0], "UNAVAILABLE", 4)
    assert [] == world.ejected()


def test_cancelled_calls_say_nothing() -> None:
    """The caller gave up, perhaps because a hedge had answered."""
    world = World()
    world.note(world.replicas[0], "CANCELLED", 100)
    assert (0, []) == (len(world.replicas[0].calls), world.ejected())


def test_each_ejection_lasts_twice_as_long_as_the_one_before() -> None:
    """After its time one failure ejects again, until a call has succeeded."""
    world, lost = World(), "UNAVAILABLE"
    first = world.replicas[0]
    world.note(first, lost, 5)
    for seconds in (1, 2, 4):
        world.advance(seconds - 0.01)
        assert [0] == world.ejected()
        world.advance(0.02)
        assert [] == world.ejected()
        world.note(first, lost if seconds < 4 else "INTERNAL")
        assert [0] == world.ejected()
    world.advance(8.01)
    world.note(first, "OK")
    world.note(first, lost)
    assert [] == world.ejected()
    assert 4 == first.num_ejected


def test_an_outage_of_some_seconds_costs_few_calls_and_little_time() -> None:
    """200 calls a second over two replicas, one of which fails for 3 s: it is left out soon, and soon called again."""
    for status, most_failed in (("UNAVAILABLE", 7), ("INTERNAL", 18)):
        world = World(2)
        first, second = world.replicas
        num_failed, back_s = 0, 0.0
        for turn in range(2000):
            world.advance(0.01)
            is_out = 500 <= turn < 800
            world.note(second, "OK", 1)
            if world.ejected():
                continue
            world.note(first, status if is_out else "OK")
            num_failed += is_out
            back_s = back_s or (turn - 800) / 100 * (turn >= 800)
        assert 0 < num_failed <= most_failed
        assert back_s <= 4.1
        assert first.num_ejected == 2


def test_an_ejection_never_lasts_longer_than_the_longest() -> None:
    """However often there was one."""
    world = World()
    world.replicas[0].num_ejections = 10_000
    world.note(world.replicas[0], "UNAVAILABLE", 5)
    world.advance(MAX_S + 0.01)
    assert [] == world.ejected()


@pytest.mark.parametrize(("num_replicas", "expected"), [(1, 0), (2, 1), (3, 1), (4, 2), (10, 5)])
def test_at_most_half_are_out_at_once(num_replicas: int, expected: int) -> None:
    """One of two or three; the only one never."""
    world = World(num_replicas)
    for record in world.replicas:
        world.note(record, "UNAVAILABLE", 50)
    assert expected == len(world.ejected())


def test_a_share_of_failures_far_above_that_of_the_others_ejects_at_once() -> None:
    """Statuses that do not follow each other, and that no row would notice."""
    world = World()
    for _ in range(30):
        for record in world.replicas:
            world.note(record, "OK")
    num_calls = 0
    while not world.note(world.replicas[1], "INTERNAL" if num_calls % 3 else "OK"):
        num_calls += 1
    assert ([1], True) == (world.ejected(), num_calls < 30)


def test_a_replica_that_fails_from_the_start_is_ejected_after_a_few_calls() -> None:
    """The tenth; below that a share says nothing."""
    world = World()
    for record in world.replicas[1:]:
        world.note(record, "OK", 30)
    assert not world.note(world.replicas[0], "INTERNAL", MIN_CALLS - 1)
    assert world.note(world.replicas[0], "INTERNAL")


def test_where_all_fail_alike_nobody_is_worse() -> None:
    """Bad requests, or a model that is broken everywhere."""
    world = World()
    for _ in range(100):
        for record in world.replicas:
            world.note(record, "OK")
            world.note(record, "INTERNAL")
    assert [] == world.ejected()


def test_old_failures_do_not_count() -> None:
    """Those before the window; and what ends while the replica is ejected began before."""
    world = World()
    first = world.replicas[0]
    world.note(world.replicas[1], "OK", 30)
    world.note(first, "INTERNAL", 9)
    world.advance(WINDOW_S + 0.01)
    world.note(first, "INTERNAL", 9)
    assert [] == world.ejected()
    world.note(first, "INTERNAL")
    world.note(first, "INTERNAL", 50)
    world.advance(BASE_S + 0.01)
    world.note(first, "OK")
    world.note(first, "INTERNAL", 3)
    assert [] == world.ejected()


def test_time_without_an_ejection_is_credited() -> None:
    """The next one is short again."""
    world = World()
    first = world.replicas[0]
    for seconds in (1, 2, 4):
        world.note(first, "UNAVAILABLE", 5)
        world.advance(seconds + 0.01)
        assert [] == world.ejected()
        world.note(first, "OK")
    world.advance(2 * CREDIT_S)
    world.note(first, "UNAVAILABLE", 5)
    assert 2 == first.num_ejections


def test_a_new_process_is_not_blamed_for_the_old_one() -> None:
    """Its ejection is void at once."""
    world = World()
    world.note(world.replicas[0], "UNAVAILABLE", 5)
    world.detector.forgive(world.replicas[0])
    assert [] == world.ejected()
    world.note(world.replicas[0], "UNAVAILABLE", 4)
    assert [] == world.ejected()


def test_the_next_return_is_known() -> None:
    """So that nothing has to be asked before."""
    world = World()
    assert world.detector.next_return_ns() > world.now_ns + 10**18
    world.note(world.replicas[0], "UNAVAILABLE", 5)
    assert world.now_ns + 1_000_000_000 == world.detector.next_return_ns()


def test_a_replica_that_left_no_longer_counts() -> None:
    """Neither as ejected nor for how many may be."""
    world = World(2)
    world.note(world.replicas[0], "UNAVAILABLE", 5)
    world.detector.leave(world.replicas[0])
    world.note(world.replicas[1], "UNAVAILABLE", 5)
    assert not world.detector.is_ejected(world.replicas[1])
