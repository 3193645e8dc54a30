"""Blocks of ended sequences used again: nothing but the time to the first token changes."""

import threading
from typing import Any

import pytest
from tests.unit.llm.engine_fixture import (
    Answer,
    alone,
    answer_all,
    answer_in_turn,
    assert_as_alone,
    finish,
    make_engine,
    random_prompts,
    submit,
)

from weft.llm.scheduler import blocks

_SHARED = random_prompts(1, 70, 70)[0]
_OTHERS = random_prompts(3, 70, 70, seed=9)
_PARAMS: dict[str, Any] = {"max_tokens": 6, "logprobs": 4}


@pytest.mark.parametrize(
    ("prompts", "options", "cached"),
    [
        *(
            ([_SHARED, [*_SHARED[:50], 1, 2, 3], [*_SHARED, 5, 6], _SHARED[:16] + [7] * 40], steps, [0, 48, 64, 16])
            for steps in ({"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 23}, {})
        ),
        ([_SHARED[:16]] * 2, {}, [0, 0]),
        ([_SHARED[:64]] * 2, {}, [0, 48]),
        ([_SHARED, _SHARED, *_OTHERS, _SHARED], {"num_blocks": 9, "watermark": 0.0}, [0, 64, 0, 0, 0, 0]),
        ([_SHARED] * 2, {"enable_prefix_caching": False}, [0, 0]),
    ],
    ids=[
        *("in steps of a block", "in odd steps", "in one step", "a whole hit computes a block", "but for one of them"),
        *("what was evicted is a miss", "off"),
    ],
)
def test_a_hit_changes_nothing(prompts: list[list[int]], options: dict[str, Any], cached: list[int]):
    """Prompts in turn get, bitwise, what they get without a cache; of each so many tokens are found."""
    answers = [Answer(prompt, **_PARAMS) for prompt in prompts]
    answer_in_turn(make_engine(**{"max_num_seqs": 4} | options), [[answer] for answer in answers])
    assert_as_alone(answers)
    assert cached == [answer.deltas[0].num_cached_tokens for answer in answers]


@pytest.mark.parametrize(("num_in_prompt", "num_cached"), [(0, 64), (14, 80)])
def test_an_answer_is_found_again(num_in_prompt: int, num_cached: int):
    """The text of an answer is in the cache as well as that of a prompt: a dialogue goes on where it stood."""
    more = alone(_SHARED, max_tokens=20).text
    prompts = _SHARED + more[:num_in_prompt], [*_SHARED, *more[: num_in_prompt + 6], 9, 9, 9]
    answers = [Answer(prompt, **_PARAMS) for prompt in prompts]
    answer_in_turn(make_engine(), [[answer] for answer in answers])
    assert_as_alone(answers)
    assert [0, num_cached] == [answer.deltas[0].num_cached_tokens for answer in answers]


def test_a_salt_keeps_tenants_apart():
    """Requests with different salts find nothing of each other, those with the same salt do."""
    answers = [Answer(_SHARED, salt=salt, **_PARAMS) for salt in (b"one", b"two", b"one", b"")]
    answer_in_turn(make_engine(), [[answer] for answer in answers])
    assert_as_alone(answers)
    assert [0, 0, 64, 0] == [answer.deltas[0].num_cached_tokens for answer in answers]


def test_equal_prompts_at_once_are_read_once():
    """Of requests with the same beginning that come together, one computes it and the others find it."""
    num_computed: list[int] = []
    engine = make_engine(max_num_seqs=8, before_step=lambda plan: num_computed.append(len(plan.token_ids)))
    answers = [Answer(_SHARED[:64] + tail, **_PARAMS) for tail in random_prompts(6, 5, 5, seed=2)]
    answer_all(engine, answers)
    assert_as_alone(answers)
    assert 64 + 6 * (5 + _PARAMS["max_tokens"] - 1) == sum(num_computed)


def test_no_step_waits_for_the_hashes_of_a_prompt(monkeypatch: pytest.MonkeyPatch):
    """The blocks of a prompt are hashed by the thread that submits it, and by no other again."""
    num_hashed = {"submitting": 0, "engine": 0}
    answer = Answer(random_prompts(1, 200, 200)[0], max_tokens=4, n=2)
    engine = make_engine()
    extend, submitting = engine.pool.hasher.extend, threading.get_ident()

    def spy(hashes, root, tokens, num_blocks):
        thread = "submitting" if threading.get_ident() == submitting else "engine"
        num_hashed[thread] += max(num_blocks - len(hashes), 0)
        extend(hashes, root, tokens, num_blocks)

    monkeypatch.setattr(engine.pool.hasher, "extend", spy)
    answer_all(engine, [answer])
    assert {"submitting": 200 // 16, "engine": 0} == num_hashed


def test_a_cancel_ends_the_hashing_of_a_prompt(monkeypatch: pytest.MonkeyPatch):
    """A request that is cancelled while its prompt is hashed ends after that slice, and gets nothing."""
    cancelled, other = (Answer(prompt, max_tokens=4) for prompt in random_prompts(2, 200, 200))
    engine = make_engine()
    monkeypatch.setattr(blocks, "_NUM_SLICE_BLOCKS", 3)
    extend = engine.pool.hasher.extend

    def cancel_after_two(hashes, root, tokens, num_blocks):
        extend(hashes, root, tokens, num_blocks)
        if len(hashes) == 6:
            engine.cancel(cancelled.request)

    monkeypatch.setattr(engine.pool.hasher, "extend", cancel_after_two)
    submit(engine, [cancelled])
    assert 6 == len(cancelled.request.block_hashes)
    monkeypatch.setattr(engine.pool.hasher, "extend", extend)
    submit(engine, [other])
    finish(engine, [other])
    assert [] == cancelled.deltas
    assert_as_alone([other])
