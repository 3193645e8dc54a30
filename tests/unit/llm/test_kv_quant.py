"""A KV cache of 8-bit codes: as bitwise reproducible as one of numbers, and close to it."""

from typing import Any

import pytest
from tests.unit.llm.engine_fixture import Answer, finish, make_engine, random_prompts, serve

_PROMPTS = random_prompts(6, 20, 60, seed=5)
_PARAMS: dict[str, Any] = {"max_tokens": 20, "logprobs": 3}
_CODES: dict[str, Any] = {"kv_cache_dtype": "int8"}


def _answers(prompts: list[list[int]], **params) -> list[Answer]:
    return [Answer(prompt, **(_PARAMS | params)) for prompt in prompts]


def _alone(prompt: list[int], max_tokens: int = 20, **options) -> Answer:
    """The answer of an engine with nothing else to do, without a prefix cache and with whole prompts."""
    (answer,) = _answers([prompt], max_tokens=max_tokens)
    serve([answer], max_num_seqs=1, enable_prefix_caching=False, **(_CODES | options))
    return answer


def _assert_as_alone(answers: list[Answer]) -> None:
    for answer in answers:
        expected = _alone(answer.request.prompt_ids.tolist(), answer.request.params.max_tokens)
        assert [expected.text] * len(answer.tokens) == answer.tokens
        assert expected.logprobs * len(answer.tokens) == answer.logprobs


def test_codes_change_little_and_something():
    """Log probabilities differ from those with a cache of numbers, in the third digit."""
    exact, rounded = _alone(_PROMPTS[0], kv_cache_dtype="auto"), _alone(_PROMPTS[0])
    difference = abs(exact.logprobs[0][0].logprob - rounded.logprobs[0][0].logprob)
    assert 0 < difference < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_the_memory_of_16_bits(dtype: str):
    """A cache of given size has as many blocks as codes and scales fit in it, for any type of computation."""
    engine = make_engine(dtype=dtype, num_blocks=0, kv_cache_bytes=2**20, **_CODES)
    token_bytes = 2 * 2 * 2 * (8 + 4)  # of 2 layers with 2 heads of 8
    assert 2**20 // (16 * token_bytes) == engine.pool.capacity + 1


@pytest.mark.parametrize("num_step_tokens", [7, 16, 64])
def test_in_a_batch_and_in_chunks_as_alone(num_step_tokens: int):
    """Whatever runs beside it and however its prompt is cut, an answer is bitwise that of an engine of its own."""
    answers = _answers(_PROMPTS)
    serve(answers, max_num_seqs=6, max_num_batched_tokens=num_step_tokens, **_CODES)
    _assert_as_alone(answers)


def test_choices_share_blocks_of_codes_and_scales():
    """Sequences that fork from one prompt each get what they get alone."""
    answers = _answers(_PROMPTS[:2], n=3)
    serve(answers, **_CODES)
    _assert_as_alone(answers)


def test_preempted_and_found_in_the_cache():
    """In a pool for 1.2 sequences three take turns, and a prompt asked twice is a hit; no bit changes."""
    prompts = [prompt[:20] for prompt in _PROMPTS[:3]]
    answers = _answers(prompts, max_tokens=60)
    first = Answer([1], max_tokens=1, on_delta=lambda delta: [engine.submit(answer.request) for answer in answers])  # type: ignore[arg-type]
    engine = make_engine(num_blocks=7, watermark=0.0, max_num_seqs=3, **_CODES)
    engine.submit(first.request)
    finish(engine, [first, *answers])
    assert engine.num_preemptions > 0
    _assert_as_alone(answers)
    again = _answers([_PROMPTS[1]] * 2)
    engine = make_engine(**_CODES)
    again[0]._on_delta = lambda delta: engine.submit(again[1].request) if delta.is_last else None
    engine.submit(again[0].request)
    finish(engine, again)
    assert again[1].deltas[0].num_cached_tokens > 0
    _assert_as_alone(again)


def test_blocks_of_numbers_and_of_codes_have_different_hashes(monkeypatch: pytest.MonkeyPatch):
    """The type of the cache is part of the hash of a block: the same tokens have another one."""
    monkeypatch.setattr("weft.llm.engine_core.secrets.token_bytes", bytes)
    roots = [make_engine(kv_cache_dtype=each).pool.hasher.root(b"") for each in ("auto", "int8", "auto")]
    assert roots[0] == roots[2]
    assert roots[0] != roots[1]
