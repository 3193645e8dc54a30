"""Sequences that come and go in one batch: each gets what it would get alone."""

import pytest
from tests.unit.llm.engine_fixture import (
    MODEL,
    VOCAB_SIZE,
    Answer,
    alone,
    finish,
    make_engine,
    random_prompts,
    serve,
)
from tests.unit.llm.permutation_model import permutation, permutation_weights

from weft.llm.models.model import TransformerModel
from weft.llm.request import UNLIMITED_TOKENS


def _greedy(prompts: list[list[int]], **options) -> list[Answer]:
    return [
        Answer(prompt, max_tokens=3 + 5 * index % 19, logprobs=3, **options) for index, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("num_seats", [2, 5, 32])
def test_batched_equals_alone(num_seats: int):
    """Greedy tokens and log probabilities are bitwise those of a request alone, however many share a step."""
    prompts = random_prompts(20, 1, 60)
    answers = _greedy(prompts)
    serve(answers, max_num_seqs=num_seats, max_num_batched_tokens=48)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = alone(prompt, max_tokens=answer.request.params.max_tokens, logprobs=3)
        assert expected.text == answer.text
        assert expected.logprobs == answer.logprobs


def test_a_request_joins_a_running_batch():
    """A request that comes while others are in the middle of their answers starts at once and changes none of them."""
    prompts = random_prompts(3, 5, 40)
    late = Answer(prompts[2], max_tokens=12)
    first = Answer(
        prompts[0],
        max_tokens=30,
        on_delta=lambda d: len(first.deltas) == 10 and engine.submit(late.request),  # type: ignore[arg-type]
    )
    second = Answer(prompts[1], max_tokens=25)
    engine = make_engine(max_num_seqs=4)
    for answer in (first, second):
        engine.submit(answer.request)
    finish(engine, [first, second, late])
    for prompt, answer in zip(prompts, (first, second, late), strict=True):
        assert alone(prompt, max_tokens=answer.request.params.max_tokens).text == answer.text


def test_an_answer_ends_as_was_asked():
    """A stop token ends an answer and is its last token; ``max_tokens`` and the context end it with ``length``."""
    prompt = random_prompts(1, 20, 20)[0]
    text = alone(prompt, max_tokens=30).text
    stop = text[7]
    stopped = Answer(prompt, max_tokens=20, stop_token_ids=(stop,))
    at_context = Answer(prompt, max_tokens=UNLIMITED_TOKENS)
    serve([stopped, at_context], max_model_len=40)
    assert text[: text.index(stop) + 1] == stopped.text
    assert ["stop"] == stopped.reasons
    assert text[:20] == at_context.text
    assert ["length"] == at_context.reasons


def test_log_probabilities_are_the_models_own():
    """Neither temperature nor penalties nor biases change what is reported, and each row gets as many as it asked."""
    prompt = random_prompts(1, 20, 20)[0]
    plain = Answer(prompt, max_tokens=1, logprobs=4)
    serve([plain])
    last = plain.logprobs[0][0].top_ids[-1]
    biased = Answer(prompt, max_tokens=1, logprobs=4, temperature=2.0, logit_bias=((last, 100.0),), seed=1)
    few = Answer(prompt, max_tokens=1, logprobs=0)
    none = Answer(prompt, max_tokens=1)
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
    prompts = random_prompts(12, 1, 50)
    answers = _greedy(prompts)
    serve(answers, model=model, deterministic=False, max_num_seqs=6, max_num_batched_tokens=32)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected, token = [], prompt[-1]
        for _ in answer.text:
            token = int(successors[token])
            expected.append(token)
        assert expected == answer.text
