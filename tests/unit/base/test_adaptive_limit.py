"""The adaptive limit against a simulated server whose capacity is known; no clock but the simulation's."""

import random

import pytest
from tests.unit.v2.simulated_server import Load, Service, constant, exponential, mixed, run

from weft.base.limits import INITIAL_LIMIT, MAX_LIMIT, MIN_LIMIT, AdaptiveLimit, Outcome

SERVICES = {"constant": (constant(0.02), 0.02), "exponential": (exponential(0.02), 0.02)}
SERVICES["cheap and dear"] = (mixed(0.005, 0.1, 0.2), 0.024)


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("num_workers", [4, 16, 48])
def test_it_finds_the_concurrency_of_the_server(num_workers: int, name: str) -> None:
    """At three times the capacity: about a fifth off what the server does at once, near its rate, and soon."""
    service, mean_s = SERVICES[name]
    capacity_per_s = num_workers / mean_s
    duration_s = 40 if name == "cheap and dear" else 10  # the mean of what differs so much takes longer to know
    before, after = run(AdaptiveLimit(), [Load(duration_s, num_workers, service, 3 * capacity_per_s)] * 2)
    slack = max(0.25 * num_workers, 4 if name == "cheap and dear" else 2)
    assert num_workers - 0.2 * num_workers <= after.mean_limit <= num_workers + slack
    assert 0.85 * capacity_per_s < after.rate_per_s < 1.1 * capacity_per_s
    assert before.rate_per_s > 0.6 * capacity_per_s


@pytest.mark.parametrize(("first", "then"), [(32, 16), (16, 32)])
def test_it_follows_a_capacity_that_changes(first: int, then: int) -> None:
    """Half or twice as many workers: the rate is that of the new capacity within seconds."""
    loads = [Load(10, workers, constant(0.02), 4800) for workers in (first, then)]
    _, after = run(AdaptiveLimit(), loads)
    assert after.mean_limit == pytest.approx(then, rel=0.25)
    assert after.rate_per_s == pytest.approx(then / 0.02, rel=0.15)


@pytest.mark.parametrize(("slow", "fast"), [(exponential(0.04), exponential(0.02)), (mixed(0.005, 0.1, 0.6),) * 2])
def test_slower_or_dearer_requests_do_not_make_it_collapse(slow: Service, fast: Service) -> None:
    """Latency that fewer in flight would not make shorter is not taken for a queue."""
    loads = [Load(20, 16, service, 4800) for service in (fast, slow, fast, slow)]
    for seen in run(AdaptiveLimit(), loads):
        assert 11 < seen.mean_limit < 24


def test_it_does_not_grow_while_it_is_not_used() -> None:
    """A load that needs two workers of 32 leaves it where it is; one that grows makes it as large as is used."""
    (seen,) = run(AdaptiveLimit(), [Load(120, 32, exponential(0.02), 100)])
    assert INITIAL_LIMIT <= min(seen.limits) <= max(seen.limits) <= INITIAL_LIMIT + 2
    *_, last = run(AdaptiveLimit(), [Load(10, 500, constant(0.02), rate) for rate in (100, 500, 1000, 2000)])
    assert last.mean_limit < 4 * 2000 * 0.02


@pytest.mark.parametrize(
    ("share", "stays_s", "outcome"),
    [
        (0.3, 0.002, Outcome.WITHDRAWN),  # clients that give up soon
        (0.3, 0.0001, Outcome.FAILED),  # errors at once
        (0.1, 0.0001, Outcome.FAILED),
        (0.02, 0.5, Outcome.WITHDRAWN),  # calls that hang until a timeout of the graph
    ],
)
def test_cancels_errors_and_timeouts_do_not_fool_it(share: float, stays_s: float, outcome: Outcome) -> None:
    """The server's capacity for what it answers is found all the same."""

    def spoil(draw: random.Random, seconds: float) -> tuple[float, Outcome]:
        return (stays_s, outcome) if draw.random() < share else (seconds, Outcome.ANSWERED)

    _, seen = run(AdaptiveLimit(), [Load(20, 16, exponential(0.02), 4800, spoil)] * 2)
    assert 11 < seen.mean_limit < 22


def test_what_is_refused_behind_lowers_it() -> None:
    """A server that refuses one in five, and is fast about it, is sent less."""

    def spoil(draw: random.Random, seconds: float) -> tuple[float, Outcome]:
        return (0.0001, Outcome.REFUSED) if draw.random() < 0.2 else (seconds, Outcome.ANSWERED)

    (seen,) = run(AdaptiveLimit(), [Load(20, 64, constant(0.02), 9600, spoil)])
    assert seen.mean_limit < INITIAL_LIMIT


def test_deadlines_that_end_every_request_lower_it() -> None:
    """Where nothing is answered in time any more there is no latency of answers; that of the others will do."""

    def spoil(draw: random.Random, seconds: float) -> tuple[float, Outcome]:
        return seconds, Outcome.WITHDRAWN

    limit = AdaptiveLimit()
    run(limit, [Load(10, 32, constant(0.02), 4800), Load(20, 4, constant(0.02), 4800, spoil)])
    assert limit.limit < 10


def test_it_stays_between_its_bounds() -> None:
    """At the least two, at the most what it is given; a maximum that is lowered counts at once."""
    limit = AdaptiveLimit(8)
    assert 8 == limit.limit
    run(limit, [Load(10, 64, constant(0.02), 9600)])
    assert 8 == limit.limit
    limit.set_maximum(1)
    assert 1 == limit.limit
    limit.set_maximum(0)
    run(limit, [Load(60, 1, constant(0.02), 9600)])
    assert MIN_LIMIT <= limit.limit <= 4 < MAX_LIMIT
