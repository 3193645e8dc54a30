"""Which of several replicas is chosen: rules over plain counts, without a socket."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from weft.router.targets.balancing import (
    least_response_time,
    rendezvous_first,
    round_robin,
    sticky,
)
from weft.router.targets.balancing.rule import ResponseTime, least_outstanding


class Clock:
    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


CLOCK = Clock()


@dataclass
class One:
    """A replica with so many calls in flight."""

    address: str
    num_inflight: int = 0
    response: ResponseTime = field(default_factory=lambda: ResponseTime(CLOCK))


def several(count: int, num_inflight: int = 0) -> list[One]:
    return [One(f"10.0.0.{i}:8021", num_inflight) for i in range(count)]


def test_of_two_the_one_with_fewer_calls_is_chosen() -> None:
    """Always, because both are drawn."""
    rule, (busy, free) = least_outstanding(random.Random(1)), several(2)
    busy.num_inflight = 3
    assert {free.address} == {rule([busy, free], "").address for _ in range(50)}


def test_two_choices_keep_the_longest_line_short() -> None:
    """1000 calls on ten replicas that never answer: no line is 4 above the mean, where chance alone leads to 20."""
    rule, replicas = least_outstanding(random.Random(1)), several(10)
    for _ in range(1000):
        rule(replicas, "").num_inflight += 1
    assert max(replica.num_inflight for replica in replicas) <= 104


def test_replicas_take_turns() -> None:
    """Each is chosen as often as the others, also while some are left out."""
    rule, replicas = round_robin(random.Random(3)), several(3)
    assert {4} == set(Counter(rule(replicas, "").address for _ in range(12)).values())
    assert {6} == set(Counter(rule(replicas[1:], "").address for _ in range(12)).values())


@pytest.mark.parametrize("rule", [least_outstanding, least_response_time])
def test_equal_replicas_share_the_calls(rule: Any) -> None:
    """None is preferred where nothing speaks for it."""
    chosen, replicas = rule(random.Random(3)), several(4)
    counts = Counter(chosen(replicas, "").address for _ in range(4000))
    assert all(900 < counts[replica.address] < 1100 for replica in replicas)


def test_response_time_and_line_count_together() -> None:
    """One that takes three times as long gets the call when three wait at the other."""
    rule, (slow, fast) = least_response_time(random.Random(1)), several(2)
    slow.response.measured(0.03)
    fast.response.measured(0.01)
    assert rule([slow, fast], "") is fast
    fast.num_inflight = 3
    assert rule([slow, fast], "") is slow


def test_a_replica_that_was_not_measured_yet_counts_as_the_other() -> None:
    """A new one is neither flooded nor starved: its line decides."""
    rule, (old, new) = least_response_time(random.Random(1)), several(2)
    old.response.measured(5.0)
    new.num_inflight = 1
    assert rule([old, new], "") is old


def test_the_mean_follows_a_rise_at_once_and_a_fall_slowly() -> None:
    """And it fades while nothing is measured, so that a slow replica gets another chance."""
    clock = Clock()
    response = ResponseTime(clock)
    assert response.mean_s is None
    response.measured(0.01)
    response.measured(1.0)
    assert 1.0 == response.mean_s
    clock.advance(1)
    response.measured(0.01)
    assert 0.85 < response.mean_s < 0.95
    clock.advance(100)
    assert response.mean_s < 0.001


def test_a_key_always_leads_to_the_same_replica() -> None:
    """In every process: the order depends on key and addresses alone."""
    rule = sticky(least_outstanding(random.Random(1)))
    replicas = several(5)
    chosen = {key: rule(replicas, key).address for key in map(str, range(200))}
    shuffled = random.Random(2).sample(replicas, 5)
    assert chosen == {key: rule(shuffled, key).address for key in chosen}
    assert 5 == len(set(chosen.values()))


def test_when_a_replica_goes_only_its_keys_move() -> None:
    """Those of the others stay where they are."""
    replicas = several(5)
    before = {key: rendezvous_first(replicas, key).address for key in map(str, range(500))}
    after = {key: rendezvous_first(replicas[1:], key).address for key in before}
    assert {replicas[0].address} == {before[key] for key in before if before[key] != after[key]}


def test_a_busy_replica_passes_its_keys_to_the_next_in_their_order() -> None:
    """Beyond 1.25 times the mean."""
    rule, replicas = sticky(least_outstanding(random.Random(1))), several(4, num_inflight=8)
    first = rendezvous_first(replicas, "k")
    second = rendezvous_first([one for one in replicas if one is not first], "k")
    assert rule(replicas, "k") is first
    first.num_inflight = 20
    assert rule(replicas, "k") is second


def test_one_hot_key_cannot_overload_its_replica() -> None:
    """Whatever the key, the line grows to 1.25 times the mean and no more."""
    rule, replicas = sticky(least_outstanding(random.Random(1))), several(4)
    for _ in range(400):
        rule(replicas, "hot").num_inflight += 1
    assert max(replica.num_inflight for replica in replicas) <= 126


@pytest.mark.parametrize("key", ["", "\ud800", "x" * 100_000, "\0"])
def test_any_key_will_do(key: str) -> None:
    """None at all, one that is no text, a huge one."""
    assert sticky(least_outstanding(random.Random(1)))(several(3), key)
