"""Two engines: one computes prompts and holds their blocks, the other takes the blocks in and goes on."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from tests.unit.llm.engine_fixture import Answer, assert_clean, make_engine, random_prompts

from weft.llm.engine import Engine
from weft.llm.request import HELD, RELEASED, EngineRequest

_KEY = b"key of the mesh"
_FOR_LONG_S = 600.0
_LATE_NS = 1 << 62


@contextmanager
def engines(**options: Any) -> Iterator[tuple[Engine, Engine]]:
    """One that computes prompts and one that goes on; both own no block in the end, and are consistent."""
    both = [make_engine(block_key=_KEY, block_size=4, **options) for _ in range(2)]
    for engine in both:
        engine.start()
    try:
        yield both[0], both[1]
    finally:
        for engine in both:
            assert engine.stop(grace_s=5.0)
            engine.transfer(lambda transfers: None)  # cancelled, does not hang
            assert 0 == engine.transfers.num_open
            assert_clean(engine)


class Prefill:
    """A request at the engine that computes prompts, until its blocks are held."""

    def __init__(self, engine: Engine, prompt: Sequence[int], hold_s: float = _FOR_LONG_S, **params: Any) -> None:
        self.engine = engine
        self.is_held = threading.Event()
        self.answer = Answer(prompt, on_delta=self._take, hold_s=hold_s, **params)
        engine.submit(self.answer.request)
        assert self.is_held.wait(30)

    def read(self, hashes: Sequence[bytes]) -> bytes:
        return self.engine.transfer(lambda transfers: transfers.read(hashes, 1 << 20)).result(30)

    def end(self) -> None:
        self.engine.transfer(lambda transfers: transfers.end(self.answer.request)).result(30)

    def _take(self, delta: Any) -> None:
        if delta.finish_reason:
            self.is_held.set()


def fetch(engine: Engine, request: EngineRequest, source: Prefill, *, num_pieces: int = 1_000) -> bool:
    """Take in the first blocks that the request lacks, one by one; whether all were wanted."""
    missing = engine.transfer(lambda transfers: transfers.hold(request, request.block_hashes, _LATE_NS)).result(30)
    return all(write(engine, request, [block_hash], source.read([block_hash])) for block_hash in missing[:num_pieces])


def write(engine: Engine, request: EngineRequest, hashes: Sequence[bytes], data: bytes) -> bool:
    return engine.transfer(lambda transfers: transfers.write(request, hashes, data)).result(30)


def resumed(engine: Engine, source: Prefill, **options: Any) -> Answer:
    """The request behind its first token, prepared at the other engine, so that it may fetch blocks."""
    own = source.answer.request
    params = {name: getattr(own.params, name) for name in own.params.__slots__}
    own_fields = {"resume_token_ids": tuple(source.answer.text), "salt": own.salt}
    answer = Answer(own.prompt_ids.tolist(), **params | own_fields | options)
    engine.prepare(answer.request)
    return answer


def whole(prompt: Sequence[int], **params: Any) -> Answer:
    """What one engine answers."""
    answer = Answer(prompt, **params)
    engine = make_engine(block_size=4)
    engine.start()
    engine.submit(answer.request)
    answer.wait()
    assert engine.stop(grace_s=5.0)
    return answer


PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 1.0, "seed": 7, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 6},
    "log probabilities": {"logprobs": 2},
    "of a tenant": {"salt": b"tenant"},
}


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("length", [1, 4, 41])
def test_apart_as_together(params: dict[str, Any], length: int) -> None:
    """First token and rest are bitwise those of one engine, and only the end of the prompt is computed again."""
    (prompt,) = random_prompts(1, length, length, seed=length)
    expected = whole(prompt, max_tokens=12, **params)
    with engines() as (first, second):
        source = Prefill(first, prompt, max_tokens=12, **params)
        assert [HELD] == source.answer.reasons
        answer = resumed(second, source)
        assert fetch(second, answer.request, source)
        second.enqueue(answer.request)
        answer.wait()
        assert expected.text == source.answer.text + answer.text
        assert expected.logprobs[0] == source.answer.logprobs[0] + answer.logprobs[0]
        assert length // 4 * 4 == second.metrics.num_cached_tokens
        source.end()
        assert [RELEASED] == source.answer.wait().reasons


def test_what_ends_with_the_first_token_holds_nothing() -> None:
    """Neither one token, nor a stop token, leaves a lease."""
    with engines() as (first, _):
        stop = whole([1, 2, 3, 4, 5], max_tokens=1).text
        assert ["length"] == Prefill(first, [1, 2, 3, 4, 5], max_tokens=1).answer.wait().reasons
        assert ["stop"] == Prefill(first, [1, 2, 3, 4, 5], stop_token_ids=stop).answer.wait().reasons
        assert 0 == first.transfers.num_open


@pytest.mark.parametrize("num_pieces", [0, 3])
def test_what_does_not_come_is_computed(num_pieces: int) -> None:
    """A fetch that fails costs time and no token."""
    (prompt,) = random_prompts(1, 40, 40)
    expected = whole(prompt, max_tokens=8)
    with engines() as (first, second):
        source = Prefill(first, prompt, max_tokens=8)
        failed = resumed(second, source)
        fetch(second, failed.request, source, num_pieces=num_pieces)
        second.enqueue(failed.request)
        assert expected.text == source.answer.text + failed.wait().text


def test_leases_end_by_themselves() -> None:
    """At the deadline, though the engine is idle; and with the request, if it is cancelled."""
    (prompt,) = random_prompts(1, 40, 40)
    with engines() as (first, second):
        source = Prefill(first, prompt, hold_s=0.05)
        assert [RELEASED] == source.answer.wait().reasons
        assert (1, 0) == (first.transfers.num_expired, first.pool.num_used)
        source = Prefill(first, prompt)
        waiting = resumed(second, source)
        assert fetch(second, waiting.request, source)
        for engine, request in ((first, source.answer.request), (second, waiting.request)):
            assert engine.transfers.num_open == 1
            engine.cancel(request)
            engine.transfer(lambda transfers: None).result(30)
            assert (0, 0) == (engine.transfers.num_open, engine.pool.num_used)


def test_late_blocks_are_ignored() -> None:
    """Of a request that is over or unknown, in the wrong size, and from a cache that has lost them."""
    (prompt,) = random_prompts(1, 40, 40)
    with engines() as (first, second):
        source = Prefill(first, prompt)
        answer = resumed(second, source)
        hashes = answer.request.block_hashes
        data = source.read(hashes)
        assert not write(second, answer.request, hashes, data), "it was not asked for"
        assert fetch(second, answer.request, source, num_pieces=0)
        assert not write(second, answer.request, hashes, data[:-1]), "a byte is missing"
        second.cancel(answer.request)
        assert not write(second, answer.request, hashes, data), "the request is over"
        second.enqueue(answer.request)
        assert b"" == source.read([bytes(16), *hashes])
        assert [] == second.transfer(lambda transfers: transfers.hold(answer.request, hashes, _LATE_NS)).result(30)


def test_leases_give_way() -> None:
    """Leases that fill the cache end before a request waits for ever, and none holds more than its share."""
    prompts = random_prompts(6, 32, 32)
    with engines(num_blocks=25) as (first, second):
        sources = [Prefill(first, prompt, max_tokens=8) for prompt in prompts]
        assert first.transfers.num_open < 3
        long = Answer(random_prompts(1, 80, 80, seed=9)[0], max_tokens=8)
        first.submit(long.request)
        assert 8 == len(long.wait().text)
        answer = resumed(second, sources[0])
        assert not fetch(second, answer.request, sources[0]), "the source has lost it"
        second.enqueue(answer.request)
        assert whole(prompts[0], max_tokens=8).text == sources[0].answer.text + answer.wait().text


def test_a_lease_that_gives_way_at_once() -> None:
    """The first token comes before the end, also where another request of the same step takes the room."""
    answers = [Answer(prompt, hold_s=_FOR_LONG_S, max_tokens=8) for prompt in random_prompts(3, 28, 28)]
    engine = make_engine(block_size=4, num_blocks=25)
    for answer in answers:
        engine.submit(answer.request)
    engine.start()
    assert engine.stop(grace_s=5.0)
    assert [(1, [RELEASED])] * 3 == [(len(answer.wait().text), answer.reasons) for answer in answers]


def test_with_a_second_tier(tmp_path: Any) -> None:
    """Blocks that make room for fetched ones are saved first, and are found again."""
    old, new = random_prompts(2, 60, 60)
    expected = [whole(prompt, max_tokens=8).text for prompt in (old, new)]
    tier = {"kv_offload_bytes": 1 << 20, "kv_offload_path": str(tmp_path), "num_blocks": 20}
    with engines(**tier) as (first, second):
        before = Answer(old, max_tokens=8)
        second.submit(before.request)
        assert expected[0] == before.wait().text
        source = Prefill(first, new, max_tokens=8)
        answer = resumed(second, source)
        assert fetch(second, answer.request, source)
        second.enqueue(answer.request)
        assert expected[1] == source.answer.text + answer.wait().text
        again = Answer(old, max_tokens=8)
        second.submit(again.request)
        assert expected[0] == again.wait().text
        assert second.pool.tier.num_loaded > 0
