"""The queue of requests that wait for a slot."""

from weft.router.admission.waiting_queue import WaitingQueue


def test_higher_levels_first_and_the_newest_of_each() -> None:
    """Whoever is removed is not served."""
    queue: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (2, "c"), (1, "d")):
        queue.add(level, waiter)
    assert queue.remove(1, "d")
    assert not queue.remove(1, "d")
    served = []
    while (waiting := queue.next()) is not None:
        served.append(waiting)
        queue.remove(*waiting)
    assert [(2, "c"), (2, "a"), (3, "b")] == served
    assert 0 == len(queue)


def test_the_one_that_gives_way_is_of_the_lowest_level_and_has_waited_longest() -> None:
    """Nobody gives way to the own level."""
    queue: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (3, "c")):
        queue.add(level, waiter)
    assert (3, "b") == queue.last_below(1)
    assert (3, "b") == queue.last_below(2)
    assert queue.last_below(3) is None
