"""Blocks of ended sequences used again: nothing but the time to the first token changes."""

import threading

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import (
    VOCAB_SIZE,
    Answer,
    alone,
    assert_clean,
    finish,
    make_engine,
    random_prompts,
)

from weft.llm.scheduler import blocks

_BLOCK_SIZE = 16
_SHARED = random_prompts(1, 70, 70)[0]
_PARAMS = {"max_tokens": 6, "logprobs": 4}


def _in_turn(prompts: list[list[int]], salts: list[bytes] | None = None, **options) -> list[Answer]:
    """Answers to ``prompts``, each asked for when the one before has come."""
    engine = make_engine(**options)
    engine.start()
    answers = []
    for prompt, salt in zip(prompts, salts or [b""] * len(prompts), strict=True):
        answers.append(Answer(prompt, salt=salt, **_PARAMS))  # type: ignore[arg-type]
        engine.submit(answers[-1].request)
        answers[-1].wait()
    assert engine.stop(grace_s=5.0)
    assert_clean(engine)
    return answers


def _cached(answers: list[Answer]) -> list[int]:
    return [answer.deltas[0].num_cached_tokens for answer in answers]


def _assert_as_alone(answers: list[Answer]) -> None:
    for answer in answers:
        expected = alone(answer.request.prompt_ids.tolist(), **_PARAMS)
        assert expected.text == answer.text
        assert expected.logprobs == answer.logprobs


@pytest.mark.parametrize("num_step_tokens", [16, 23, 256])
def test_a_hit_changes_nothing(num_step_tokens: int):
    """Prompts that share their beginning get, bitwise, what they get without a cache; whole blocks are found."""
    prompts = [_SHARED, [*_SHARED[:50], 1, 2, 3], [*_SHARED, 5, 6], _SHARED[:16] + [7] * 40]
    answers = _in_turn(prompts, max_num_batched_tokens=num_step_tokens, max_num_seqs=4)
    _assert_as_alone(answers)
    assert [0, 48, 64, 16] == _cached(answers)


@pytest.mark.parametrize("prompt_len", [16, 64])
def test_a_whole_hit_keeps_a_token_to_compute(prompt_len: int):
    """Of a prompt that is in the cache to its last token one block is computed again, because its logits are needed."""
    answers = _in_turn([_SHARED[:prompt_len]] * 2)
    _assert_as_alone(answers)
    assert [0, prompt_len - _BLOCK_SIZE] == _cached(answers)


def test_an_answer_is_found_again():
    """The text of an answer is in the cache as well as that of a prompt: a dialogue goes on where it stood."""
    (first,) = _in_turn([_SHARED])
    dialogue = [*_SHARED, *first.text, 9, 9, 9]
    answers = _in_turn([_SHARED, dialogue])
    _assert_as_alone(answers)
    assert [0, 64] == _cached(answers)
    longer = alone(_SHARED, max_tokens=20).text
    engine_answers = _in_turn([_SHARED + longer[:14], [*_SHARED, *longer, 4]])
    assert 80 == _cached(engine_answers)[1]


def test_evicted_blocks_are_computed_again():
    """When other sequences have taken the blocks, the prompt is a miss, and gets the same answer."""
    others = random_prompts(3, 70, 70, seed=9)
    answers = _in_turn([_SHARED, _SHARED, *others, _SHARED], num_blocks=9, watermark=0.0)
    _assert_as_alone(answers)
    cached = _cached(answers)
    assert 64 == cached[1]
    assert 0 == cached[-1]


def test_a_salt_keeps_tenants_apart():
    """Requests with different salts find nothing of each other, those with the same salt do."""
    answers = _in_turn([_SHARED] * 4, [b"one", b"two", b"one", b""])
    _assert_as_alone(answers)
    assert [0, 0, 64, 0] == _cached(answers)


def test_it_can_be_off():
    """With ``enable_prefix_caching`` false nothing is found."""
    answers = _in_turn([_SHARED] * 2, enable_prefix_caching=False)
    assert [0, 0] == _cached(answers)


def test_equal_prompts_at_once_are_read_once():
    """Of requests with the same beginning that come together, one computes it and the others find it."""
    num_computed: list[int] = []
    engine = make_engine(max_num_seqs=8, before_step=lambda plan: num_computed.append(len(plan.token_ids)))
    tails = np.random.default_rng(2).integers(0, VOCAB_SIZE, (6, 5)).tolist()
    answers = [Answer(_SHARED[:64] + tail, **_PARAMS) for tail in tails]  # type: ignore[arg-type]
    for answer in answers:
        engine.submit(answer.request)
    engine.start()
    for answer in answers:
        answer.wait()
    assert engine.stop(grace_s=5.0)
    _assert_as_alone(answers)
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
    engine.submit(answer.request)
    finish(engine, [answer])
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
    engine.submit(cancelled.request)
    assert 6 == len(cancelled.request.block_hashes)
    monkeypatch.setattr(engine.pool.hasher, "extend", extend)
    engine.submit(other.request)
    finish(engine, [other])
    assert [] == cancelled.deltas
    assert alone(other.request.prompt_ids.tolist(), max_tokens=4).text == other.text
