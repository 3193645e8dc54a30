"""When a channel may dial again."""

import pytest

from weft.wire.client.link import Backoff
from weft.wire.client.protocol import ChannelOptions

OPTIONS = ChannelOptions(initial_backoff_s=0.1, max_backoff_s=2.0, backoff_factor=2.0, backoff_jitter=0.2)
#: Attempts to connect: how each ended, from when until when, and the delay before the next one. A connection that was
#: made and is lost later has ended with ``lost``.
ATTEMPTS = {
    "delays grow up to a limit": [("failed", 10, 10, delay) for delay in (0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0)],
    "a delay counts from the start of the attempt": [("failed", 10, 10.06, 0.04), ("failed", 20, 30, 0)],
    "a connection resets the delays": [
        *(("failed", 0, 0, delay) for delay in (0.1, 0.2, 0.4)), ("lost", 10, 100, 0), ("failed", 100, 100, 0.1),
    ],
    "connections that end at once are replaced at once, later ones with growing delays": [
        ("lost", 10, 10, delay) for delay in (0, 0.1, 0.2, 0.4)
    ],
    "a connection that lasted a second forgives those before it": [
        ("lost", 0, 0, 0), ("lost", 0, 0, 0.1), ("lost", 1, 2, 0), ("lost", 2, 2, 0),
    ],
}  # fmt: skip


@pytest.mark.parametrize("attempts", ATTEMPTS.values(), ids=ATTEMPTS)
def test_delays(attempts: list[tuple[str, float, float, float]]) -> None:
    """Each attempt is followed by its delay."""
    backoff = Backoff(OPTIONS, lambda: 0.5)
    for outcome, start_s, end_s, delay_s in attempts:
        backoff.begin(start_s)
        if outcome == "lost":
            backoff.succeed(start_s)
        assert (backoff.lose if outcome == "lost" else backoff.fail)(end_s) == pytest.approx(delay_s)


@pytest.mark.parametrize(("random", "delay_s"), [(0.0, 0.08), (1.0, 0.12)])
def test_delays_are_spread(random: float, delay_s: float) -> None:
    """The jitter makes a delay shorter or longer by its share."""
    backoff = Backoff(OPTIONS, lambda: random)
    backoff.begin(0.0)
    assert backoff.fail(0.0) == pytest.approx(delay_s)
