"""Sequences that come and go in one batch, in pieces, and lose their blocks: each gets what it would get alone."""

from typing import Any

import pytest
from tests.unit.llm.engine_fixture import (
    MODEL,
    VOCAB_SIZE,
    Answer,
    alone,
    assert_as_alone,
    finish,
    make_engine,
    preempt,
    random_prompts,
    serve,
    submit,
)
from tests.unit.llm.permutation_model import permutation, permutation_weights

from weft.llm.models.model import TransformerModel
from weft.llm.request import UNLIMITED_TOKENS
from weft.llm.scheduler.plan import ForwardPlan

_CODES: dict[str, Any] = {"kv_cache_dtype": "int8"}
_LONG = random_prompts(1, 77, 77)[0]
_PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.6, "presence_penalty": 0.3, "min_tokens": 76}


def _answers(prompts: list[list[int]], **params: Any) -> list[Answer]:
    options: dict[str, Any] = {"logprobs": 3} | params
    return [Answer(p, **({"max_tokens": 3 + 5 * index % 19} | options)) for index, p in enumerate(prompts)]


@pytest.mark.parametrize(("num_seats", "options"), [(2, {}), (5, {}), (32, {}), (6, _CODES)])
def test_batched_equals_alone(num_seats: int, options: dict[str, Any]):
    """Tokens and log probabilities are bitwise those of a request alone, however many share a step."""
    answers = _answers(random_prompts(20, 1, 60))
    serve(answers, max_num_seqs=num_seats, max_num_batched_tokens=48, **options)
    assert_as_alone(answers, **options)


@pytest.mark.parametrize("options", [{}, _CODES], ids=["numbers", "codes"])
@pytest.mark.parametrize("num_step_tokens", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 64, 76, 77, 128])
def test_chunked_equals_one_shot(num_step_tokens: int, options: dict[str, Any]):
    """Whatever part of a prompt a step takes, tokens and log probabilities are those of the prompt in one step."""
    sizes: list[int] = []
    (answer,) = _answers([_LONG], max_tokens=8)
    steps = {"max_num_seqs": 1, "max_num_batched_tokens": num_step_tokens}
    serve([answer], before_step=lambda plan: sizes.append(len(plan.token_ids)), **steps, **options)
    assert num_step_tokens >= max(sizes)
    assert len(_LONG) == sum(sizes[: 1 - len(answer.text)])
    assert_as_alone([answer], **options)


@pytest.mark.parametrize("num_step_tokens", [8, 24, 40])
def test_a_long_prompt_goes_on_beside_running_answers(num_step_tokens: int):
    """Answers get a token in every step while a long prompt is read in chunks, and nobody's tokens change."""
    plans: list[ForwardPlan] = []
    answers = [*_answers(random_prompts(4, 2, 6), max_tokens=30), *_answers([_LONG], max_tokens=6)]
    serve(
        answers,
        max_num_seqs=8,
        max_num_batched_tokens=num_step_tokens,
        long_prefill_token_threshold=max(4, num_step_tokens - 8),
        before_step=plans.append,
    )
    mixed = [plan for plan in plans if len(plan.slots) == 5 and plan.max_q_len > 1]
    assert len(mixed) >= 2
    assert all(len(plan.sample_rows) >= 4 for plan in mixed[1:])
    assert_as_alone(answers)


def test_a_request_joins_a_running_batch():
    """A request that comes while others are in the middle of their answers starts at once and changes none of them."""
    first, second, late = answers = _answers(random_prompts(3, 5, 40), max_tokens=25)
    engine = make_engine(max_num_seqs=4)
    first._on_delta = lambda delta: submit(engine, [late] if len(first.deltas) == 10 else [])
    submit(engine, [first, second])
    finish(engine, answers)
    assert_as_alone(answers)


@pytest.mark.parametrize("num_step_tokens", [8, 128])
def test_choices_equal_independent_runs(num_step_tokens: int):
    """Choice ``i`` of a request with ``n`` is what a request of its own with the seed ``seed + i`` gets."""
    (several,) = _answers([_LONG[:33]], n=4, seed=100, temperature=1.0, max_tokens=40)
    serve([several], max_num_seqs=6, max_num_batched_tokens=num_step_tokens)
    assert_as_alone([several])


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({}, {}),
        ({}, {"enable_prefix_caching": False}),
        ({"temperature": 1.0, "seed": 11}, {}),
        ({"temperature": 1.0, "seed": 11}, {"enable_prefix_caching": False}),
        (_PENALTIES, {}),
        ({}, _CODES),
    ],
)
def test_preempted_equals_undisturbed(params: dict[str, Any], options: dict[str, Any]):
    """In a pool of 1.2 times one sequence, three take turns; what they say, penalties too, is bitwise that alone."""
    answers = _answers(random_prompts(3, 20, 20, seed=4), max_tokens=76, **params)
    preempt(answers, **options)
    assert_as_alone(answers, **{name: value for name, value in options.items() if name in _CODES})


def test_a_better_level_takes_a_seat():
    """A request of a smaller level takes the only slot in the middle of an answer, and that goes on afterwards."""
    low, high = _answers(random_prompts(2, 20, 20, seed=4), max_tokens=40)
    low.request.level, high.request.level = 2, 1
    order: list[str] = []
    engine = make_engine(max_num_seqs=1)
    low._on_delta = lambda delta: engine.submit(high.request) if len(low.deltas) == 20 else order.append("low")
    high._on_delta = lambda delta: order.append("high")
    engine.submit(low.request)
    finish(engine, [low, high])
    assert 1 == engine.num_preemptions
    assert ["low"] * 19 + ["high"] * 40 == order[:59]
    assert_as_alone([low, high])


def test_an_answer_ends_as_was_asked():
    """A stop token ends an answer and is its last token; ``max_tokens`` and the context end it with ``length``."""
    prompt = random_prompts(1, 20, 20)[0]
    text = alone(prompt, max_tokens=30).text
    stop = text[7]
    stopped = Answer(prompt, max_tokens=20, stop_token_ids=(stop,))
    at_context = Answer(prompt, max_tokens=UNLIMITED_TOKENS)
    serve([stopped, at_context], max_model_len=40)
    assert (text[: text.index(stop) + 1], ["stop"]) == (stopped.text, stopped.reasons)
    assert (text[:20], ["length"]) == (at_context.text, at_context.reasons)


def test_log_probabilities_are_the_models_own():
    """Neither temperature nor penalties nor biases change what is reported, and each row gets as many as it asked."""
    prompt = random_prompts(1, 20, 20)[0]
    plain = Answer(prompt, max_tokens=1, logprobs=4)
    serve([plain])
    last = plain.logprobs[0][0].top_ids[-1]
    biased = Answer(prompt, max_tokens=1, logprobs=4, temperature=2.0, logit_bias=((last, 100.0),), seed=1)
    few, none = Answer(prompt, max_tokens=1, logprobs=0), Answer(prompt, max_tokens=1)
    serve([none, biased, few])
    ((expected,),) = plain.logprobs
    assert expected.logprob == expected.top_logprobs[0]
    assert [last] == biased.text
    assert [[(expected.top_logprobs[-1], *expected[1:])]] == biased.logprobs
    assert [[(expected.logprob, (), ())]] == few.logprobs
    assert [[]] == none.logprobs


def test_the_permutation_model_says_its_text_in_a_mixed_batch():
    """Without deterministic mode, too, the tokens of a model with a wide margin are the known text."""
    successors = permutation(VOCAB_SIZE, 5)
    model = TransformerModel(MODEL, permutation_weights(MODEL, 5))
    answers = _answers(random_prompts(12, 1, 50))
    serve(answers, model=model, deterministic=False, max_num_seqs=6, max_num_batched_tokens=32)
    for answer in answers:
        known = [*answer.request.prompt_ids.tolist()[-1:], *answer.text]
        assert known[1:] == successors[known[:-1]].tolist()


def test_codes_of_the_cache_change_little_and_something():
    """With a cache of 8-bit codes log probabilities differ from those with numbers, in the third digit."""
    exact, rounded = (alone(_LONG, options, max_tokens=1, logprobs=3) for options in ({}, _CODES))
    assert 0 < abs(exact.logprobs[0][0].logprob - rounded.logprobs[0][0].logprob) < 0.02


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_codes_have_half_the_memory_of_16_bits(dtype: str):
    """A cache of given size has as many blocks as codes and scales fit in it, for any type of computation."""
    engine = make_engine(dtype=dtype, num_blocks=0, kv_cache_bytes=2**20, **_CODES)
    token_bytes = 2 * 2 * 2 * (8 + 4)  # of 2 layers with 2 heads of 8
    assert 2**20 // (16 * token_bytes) == engine.pool.capacity + 1


def test_choices_share_blocks_of_codes_and_prompts_find_them():
    """Sequences that fork from one prompt, and a prompt asked twice, each get what they get alone."""
    forks = _answers(random_prompts(2, 20, 60, seed=5), n=3)
    serve(forks, **_CODES)
    again = _answers([_LONG] * 2)
    engine = make_engine(**_CODES)
    again[0]._on_delta = lambda delta: submit(engine, again[1:] if delta.is_last else [])
    submit(engine, again[:1])
    finish(engine, again)
    assert again[1].deltas[0].num_cached_tokens > 0
    assert_as_alone([*forks, *again], **_CODES)
