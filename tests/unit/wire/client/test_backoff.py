"""When a channel may dial again."""

import pytest

from weft.wire.client.link import Backoff
from weft.wire.client.protocol import ChannelOptions

OPTIONS = ChannelOptions(initial_backoff_s=0.1, max_backoff_s=2.0, backoff_factor=2.0, backoff_jitter=0.2)


def middle() -> float:
    return 0.5


def test_delays_grow_up_to_a_limit() -> None:
    """Each failure multiplies the delay, until it is the largest one."""
    backoff = Backoff(OPTIONS, middle)
    delays = []
    for _ in range(7):
        backoff.begin(10.0)
        delays.append(round(backoff.fail(10.0), 6))
    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


def test_a_delay_counts_from_the_start_of_the_attempt() -> None:
    """An attempt that took longer than its delay is followed by the next one at once."""
    backoff = Backoff(OPTIONS, middle)
    backoff.begin(10.0)
    assert backoff.fail(10.06) == pytest.approx(0.04)
    backoff.begin(20.0)
    assert backoff.fail(30.0) == 0.0


def test_a_connection_resets_the_delays() -> None:
    """After a connection, the first failure has the first delay."""
    backoff = Backoff(OPTIONS, middle)
    for _ in range(5):
        backoff.begin(0.0)
        backoff.fail(0.0)
    backoff.begin(10.0)
    backoff.succeed(10.0)
    assert backoff.lose(100.0) == 0.0
    backoff.begin(100.0)
    assert backoff.fail(100.0) == pytest.approx(0.1)


@pytest.mark.parametrize(("random", "delay_s"), [(0.0, 0.08), (1.0, 0.12)])
def test_delays_are_spread(random: float, delay_s: float) -> None:
    """The jitter makes a delay shorter or longer by its share."""
    backoff = Backoff(OPTIONS, lambda: random)
    backoff.begin(0.0)
    assert backoff.fail(0.0) == pytest.approx(delay_s)


def test_connections_that_end_at_once() -> None:
    """The first connection that ends as soon as it is made is replaced at once, those after it with growing delays."""
    backoff = Backoff(OPTIONS, middle)
    delays = []
    for _ in range(4):
        backoff.begin(10.0)
        backoff.succeed(10.0)
        delays.append(backoff.lose(10.0))
    assert delays == pytest.approx([0.0, 0.1, 0.2, 0.4])


def test_a_connection_that_lasted_forgives_those_before_it() -> None:
    """After a connection of a second or more, a loss is no failure."""
    backoff = Backoff(OPTIONS, middle)
    for now_s, end_s, delay_s in ((0.0, 0.0, 0.0), (0.0, 0.0, 0.1), (1.0, 2.0, 0.0), (2.0, 2.0, 0.0)):
        backoff.begin(now_s)
        backoff.succeed(now_s)
        assert backoff.lose(end_s) == pytest.approx(delay_s)
