"""The balancing rule ``prefix``: where prompts go, by what was sent where, over plain counts and without a socket."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.unit.router.targets.test_balancing import One, several

from weft.base.core import InferCall, InferResult
from weft.base.tensors import encode
from weft.router.targets.balancing.prefix import MAX_PIECES, PIECE_BYTES, PrefixRule, Prompt, read_prompt


def text_of(*pieces: str) -> str:
    """A text whose pieces begin so."""
    return "".join(piece.ljust(PIECE_BYTES, ".") for piece in pieces)


def call(text: str | bytes = "", ids: Sequence[int] = (), sampling: Any = None, **parameters: Any) -> InferCall:
    inputs = {"text_input": encode(np.array([text if isinstance(text, bytes) else text.encode()], np.object_))}
    if ids:
        inputs = {"input_ids": encode(np.array(ids, np.int32))}
    if sampling is not None:
        inputs["sampling_parameters"] = encode(np.array([json.dumps(sampling).encode()], np.object_))
    return InferCall(parameters.pop("model", "m"), parameters.pop("version", ""), parameters=parameters, inputs=inputs)


def prompt(*pieces: str, **options: Any) -> Prompt:
    found = read_prompt(call(text_of(*pieces), **options))
    assert found is not None
    return found


def answer(num_input: int, num_cached: int) -> InferResult:
    counts = {"num_input_tokens": num_input, "num_cached_tokens": num_cached}
    return InferResult("m", "1", outputs={name: encode(np.array([n], np.uint32)) for name, n in counts.items()})


@pytest.fixture
def rule() -> PrefixRule:
    return PrefixRule(random.Random(1))


def test_a_prompt_follows_the_longest_beginning(rule: PrefixRule) -> None:
    """Not the last that was sent, nor the replica with fewest calls; a session stays where it is."""
    replicas = several(4)
    first = rule(replicas, prompt("system", "hello"))
    first.num_inflight = 2
    others = [one for one in replicas if one is not first]
    second = rule(others, prompt("system", "other"))
    for one in replicas:
        one.num_inflight = 1
    second.num_inflight = 0
    assert rule(replicas, prompt("system", "hello", "and more")) is first
    assert rule(replicas, prompt("system", "other", "and more")) is second
    assert {"most": 2, "load": 0, "new": 2} == dict(rule.outcomes)


def test_of_equal_beginnings_the_fewest_calls_decide(rule: PrefixRule) -> None:
    """A new session goes to the replica that is least busy of those that have the system prompt."""
    replicas = several(3)
    for one in replicas:
        rule([one], prompt("system", one.address))
        one.num_inflight = 2
    replicas[1].num_inflight = 1
    assert rule(replicas, prompt("system", "a new one")) is replicas[1]


def test_a_busy_replica_gets_no_more_than_its_share(rule: PrefixRule) -> None:
    """At most 1.5 times the mean of the calls in flight, rounded up, or two; the next best beginning comes then."""
    replicas = several(4)
    home, second = replicas[0], replicas[1]
    rule([home], prompt("system", "a", "b"))
    rule([second], prompt("system", "a"))
    for _ in range(400):
        rule(replicas, prompt("system", "a", "b")).num_inflight += 1
        mean = sum(one.num_inflight for one in replicas) / 4
        assert max(one.num_inflight for one in replicas) <= max(2, 1.5 * mean + 1)
    assert home.num_inflight >= 100
    assert rule.outcomes["load"] > 0


def test_sessions_of_one_system_prompt_use_all_caches(rule: PrefixRule) -> None:
    """Also where calls never overlap; each session stays at one replica."""
    replicas = several(4)
    homes = {number: rule(replicas, prompt("system", f"session {number}", "more")) for number in range(80)}
    assert set(Counter(one.address for one in homes.values()).values()) <= set(range(10, 33))
    again = {number: rule(replicas, prompt("system", f"session {number}", "more", "again")) for number in homes}
    assert homes == again


def test_new_prompts_spread_alike_in_all_processes() -> None:
    """By their first piece: routers that know nothing of one another send equal beginnings to one replica."""
    replicas = several(4)
    rules = [PrefixRule(random.Random(seed)) for seed in range(2)]
    chosen = [[rule(replicas, prompt(f"text {number}")).address for number in range(200)] for rule in rules]
    assert chosen[0] == chosen[1]
    assert all(30 < count < 70 for count in Counter(chosen[0]).values())


_APART: list[dict[str, Any]] = [
    {"model": "other"},
    {"version": "2"},
    {"cache_salt": "x"},
    {"sampling": {"lora_name": "a"}},
]


@pytest.mark.parametrize("other", _APART, ids=str)
def test_what_shares_no_cache_shares_no_memory(rule: PrefixRule, other: dict[str, Any]) -> None:
    """Another model, version, salt or adapter is another prompt; other sampling parameters are not."""
    replicas = several(2)
    rule(replicas, prompt("system", sampling={"temperature": 0, "seed": 3}))
    rule(replicas, prompt("system", **other))
    assert {"most": 0, "load": 0, "new": 2} == dict(rule.outcomes)
    rule(replicas, prompt("system", sampling={"max_tokens": 9}))
    rule(replicas, prompt("system", **other))
    assert 2 == rule.outcomes["most"]


def test_what_has_no_beginning_goes_where_few_calls_are(rule: PrefixRule) -> None:
    """A short or empty text, a call without inputs or without a prompt among them, a tensor without elements."""
    busy, free = several(2, 3)
    free.num_inflight = 0
    others = [{}, {"X": encode(np.zeros(4096, np.float32))}, {"text_input": encode(np.array([], np.object_))}]
    for one in (call(""), call("x" * (PIECE_BYTES - 1)), *(InferCall("m", inputs=inputs) for inputs in others)):
        assert read_prompt(one) is None
    assert {free.address} == {rule([busy, free], key).address for key in (None, "")}
    assert 0 == sum(rule.outcomes.values())


def test_memory_is_bounded() -> None:
    """The least recently used pieces go first, and ends of prompts before their beginnings; a huge prompt is cut."""
    rule, replicas = PrefixRule(random.Random(1), max_remembered=100), several(4)
    key = read_prompt(call(ids=range(100 * MAX_PIECES)))
    assert key is not None
    assert MAX_PIECES == len(key.pieces)
    home = rule(replicas, prompt("old", *map(str, range(49))))
    for number in range(60):
        rule(replicas, prompt(f"text {number}"))
    assert 100 == len(rule._sent)
    assert rule(replicas, prompt("old", "0", "1", "new")) is home
    rule(replicas, key)
    assert 100 == len(rule._sent)
    rule(replicas, prompt("old"))
    assert {"most": 1, "load": 0, "new": 63} == dict(rule.outcomes)


def test_an_answer_that_had_nothing_cached_corrects_the_memory(rule: PrefixRule) -> None:
    """A replica was started again, or evicted the prompt: what it was sent before counts no more, what comes does."""
    replicas = several(2)
    home = rule(replicas, prompt("a", "b", "c", "d"))
    assert rule(replicas, prompt("a", "b", "c", "e")) is home
    rule([home], prompt("x", "y"))
    expecting = prompt("a", "b", "c", "e", "f")
    assert rule(replicas, expecting) is home
    rule.note(home.address, expecting, answer(300, 0))
    old = prompt("a", "b", "c", "d")
    rule(replicas, old)
    assert 3 * PIECE_BYTES == old.expected, "only what came since"
    newer = prompt("x", "y")
    rule([home], newer)
    assert 2 * PIECE_BYTES == newer.expected, "it was sent later"


def test_an_answer_as_expected_changes_nothing(rule: PrefixRule) -> None:
    """Nor does one without counts, or to a call without a prompt."""
    replicas, key = several(2), prompt("a", "b")
    rule(replicas, prompt("a", "b"))
    home = rule(replicas, key)
    for result in (answer(300, 200), answer(0, 0), InferResult("m", "1")):
        for given in (key, None, ""):
            rule.note(home.address, given, result)
    assert rule(replicas, prompt("a", "b")) is home
    assert 2 == rule.outcomes["most"]


def test_a_replica_that_goes_and_comes(rule: PrefixRule) -> None:
    """Its prompts go elsewhere meanwhile, and are shared afterwards; a new replica gets its part of what is new."""
    replicas = several(3)
    keys = [(f"text {number}", "more") for number in range(60)]
    homes = {key: rule(replicas, prompt(*key)).address for key in keys}
    gone = replicas[0].address
    without = {key: rule(replicas[1:], prompt(*key)).address for key in keys}
    assert all(without[key] == home for key, home in homes.items() if home != gone)
    joined = [*replicas, One("10.0.9.9:8021")]
    assert all(rule(joined, prompt(*key)).address in (homes[key], without[key]) for key in keys)
    assert "10.0.9.9:8021" in {rule(joined, prompt(f"other {number}")).address for number in range(40)}
