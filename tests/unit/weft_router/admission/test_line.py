"""The line in front of a admission."""

from weft_router.admission.waiting_queue import WaitingQueue


def test_higher_levels_first_and_the_newest_of_each() -> None:
    """Whoever is removed is not served."""
    line: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (2, "c"), (1, "d")):
        line.add(level, waiter)
    assert line.remove(1, "d")
    assert not line.remove(1, "d")
    served = []
    while (waiting := line.next()) is not None:
        served.append(waiting)
        line.remove(*waiting)
    assert [(2, "c"), (2, "a"), (3, "b")] == served
    assert 0 == len(line)


def test_the_one_that_gives_way_is_of_the_lowest_level_and_has_waited_longest() -> None:
    """Nobody gives way to the own level."""
    line: WaitingQueue[str] = WaitingQueue(3)
    for level, waiter in ((2, "a"), (3, "b"), (3, "c")):
        line.add(level, waiter)
    assert (3, "b") == line.last_below(1)
    assert (3, "b") == line.last_below(2)
    assert line.last_below(3) is None
