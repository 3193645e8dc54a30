"""Where sequences live, and how long that is remembered."""

from weft.router.targets.replicas import Pins


def test_a_sequence_stays_where_it_is_until_it_is_over() -> None:
    """A number and a text that look alike are two sequences."""
    pins = Pins(lambda: 0)
    pins.set(("m", 1), "a")
    pins.set(("m", "1"), "b")
    assert ("a", "b", None) == (pins.get(("m", 1)), pins.get(("m", "1")), pins.get(("n", 1)))
    assert (True, False) == (pins.has("a"), pins.has("c"))
    pins.forget(("m", 1))
    pins.forget(("m", 1))
    assert (None, False) == (pins.get(("m", 1)), pins.has("a"))


def test_the_longest_idle_is_forgotten_first() -> None:
    """A request makes a sequence young again; memory is bounded."""
    pins = Pins(lambda: 0, max_pins=2)
    for sequence in ("a", "b", "a", "c"):
        pins.set(sequence, sequence)
    assert (2, "a", None) == (len(pins), pins.get("a"), pins.get("b"))


def test_an_idle_sequence_has_ended() -> None:
    """After an hour without a request; what is idle is dropped when another one has a request."""
    now_s = 0
    pins = Pins(lambda: now_s * 10**9, max_idle_s=3600)
    pins.set("a", "x")
    now_s = 3599
    assert "x" == pins.get("a")
    now_s = 3600
    assert pins.get("a") is None
    pins.set("b", "x")
    assert 1 == len(pins)
