"""Speculation: tokens, log probabilities, reasons and counts are those without it, whatever the drafts are."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import Answer, MODEL, assert_clean, finish, make_engine, random_prompts, serve, submit
from tests.unit.llm.permutation_model import permutation, permutation_weights
from tests.unit.llm.speculation_fixture import SAMPLING_KINDS, Oracle, device_options

from weft.base.errors import InvalidArgumentError
from weft.llm.engine import Engine
from weft.llm.models.model import TransformerModel
from weft.llm.request import SamplingParams
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator

_PLACES = ["host", "device"]
#: Sampling parameters of every kind; the second of each pair of requests is sampled.
_KINDS: list[dict[str, Any]] = [
    *SAMPLING_KINDS,
    {"min_tokens": 5, "stop_token_ids": tuple(range(60)), "frequency_penalty": 0.3},
]


def _answers(num_new: int = 24, kinds: Sequence[dict[str, Any]] = _KINDS) -> list[Answer]:
    prompts = random_prompts(len(kinds), 3, 40, seed=9)
    return [Answer(prompt, max_tokens=num_new, logprobs=3, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


def _serve(answers: Sequence[Answer], oracle: Oracle, num_drafts: int, place: str, **options: Any) -> Engine:
    """All answers have come from an engine with ``num_drafts`` drafts of the oracle."""
    if place == "device":
        return serve(answers, **device_options(oracle, num_drafts), **options)
    return serve(answers, speculator=oracle.speculator(num_drafts), **options)


def _assert_equal(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens == other.tokens
        assert one.reasons == other.reasons
        assert one.logprobs == other.logprobs


@cache
def _reference() -> list[Answer]:
    """The answers without speculation."""
    answers = _answers()
    serve(answers)
    return answers


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("num_drafts", range(1, 9))
def test_a_mixed_batch_is_as_without_drafts(place: str, num_drafts: int):
    """Greedy and sampled, with penalties, biases, stops, several choices: bitwise equal with 1 to 8 drafts each."""
    expected, actual = _reference(), _answers()
    engine = _serve(actual, Oracle(expected, 0.3), num_drafts, place)
    _assert_equal(expected, actual)
    assert engine.speculator is not None
    assert 0 < engine.speculator.num_accepted < engine.speculator.num_drafts
    assert 1 < engine.speculator.mean_accepted_len


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("error_rate", [0.0, 1.0])
def test_right_and_wrong_drafts_are_as_none(place: str, error_rate: float):
    """Drafts that are all right make fewer steps, drafts that are all wrong no more; the tokens are the same."""
    expected, actual = _answers(kinds=_KINDS[:5]), _answers(kinds=_KINDS[:5])
    without = serve(expected)
    engine = _serve(actual, Oracle(expected, error_rate), 4, place)
    _assert_equal(expected, actual)
    assert engine.metrics.num_output_tokens == without.metrics.num_output_tokens == 5 * 24
    if error_rate:
        assert engine.metrics.num_steps == without.metrics.num_steps
    else:
        assert engine.metrics.num_steps <= without.metrics.num_steps / 3


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("num_step_tokens", [8, 17, 64])
def test_short_steps_and_chunks_are_as_long_ones(place: str, num_step_tokens: int):
    """Drafts take what prompts leave of a step: chunked prefill and few tokens per step change nothing."""
    expected, actual = _reference(), _answers()
    plans = []
    _serve(
        actual,
        Oracle(expected, 0.2),
        5,
        place,
        max_num_seqs=6,
        max_num_batched_tokens=num_step_tokens,
        before_step=plans.append,
    )
    _assert_equal(expected, actual)
    assert max(len(plan.token_ids) for plan in plans) <= num_step_tokens


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted_with_drafts_is_as_undisturbed(place: str, enable_prefix_caching: bool):
    """In a pool of 1.2 times one sequence, three take turns, and drafts take what is left; nothing is different."""
    num_new, num_blocks = 60, round(1.2 * 80 / 16) + 1
    kinds = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2, "frequency_penalty": 0.5}]
    prompts = random_prompts(3, 20, 20, seed=4)

    def make() -> list[Answer]:
        return [
            Answer(prompt, max_tokens=num_new, logprobs=1, **kind)  # type: ignore[arg-type]
            for prompt, kind in zip(prompts, kinds, strict=True)
        ]

    expected, actual = make(), make()
    serve(expected)
    oracle = Oracle(expected, 0.2)
    options: dict[str, Any] = device_options(oracle, 4) if place == "device" else {"speculator": oracle.speculator(4)}
    first = Answer([1], max_tokens=1, on_delta=lambda delta: [engine.submit(answer.request) for answer in actual])  # type: ignore[arg-type]
    engine = make_engine(
        num_blocks=num_blocks, watermark=0.0, max_num_seqs=3, enable_prefix_caching=enable_prefix_caching, **options
    )
    engine.submit(first.request)
    finish(engine, [first, *actual])
    assert engine.num_preemptions > 0
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 0
    _assert_equal(expected, actual)


@pytest.mark.parametrize("place", _PLACES)
@pytest.mark.parametrize(
    "options",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=lambda options: "".join(options.values()),
)
def test_rounded_models_are_as_without_drafts(place: str, options: dict[str, str]):
    """Bitwise equal with 16-bit numbers, 8-bit caches and low-bit weights too."""
    expected, actual = _answers(), _answers()
    serve(expected, **options)
    engine = _serve(actual, Oracle(expected, 0.3), 4, place, **options)
    _assert_equal(expected, actual)
    assert engine.speculator is not None
    assert engine.speculator.num_accepted > 0


@pytest.mark.parametrize("place", _PLACES)
def test_prefixes_that_drafts_wrote_are_found_again(place: str):
    """Blocks of accepted drafts serve later prompts from the cache; those of rejected ones are never found."""
    (first,) = _answers(kinds=[{"temperature": 1.0, "seed": 3}], num_new=60)
    serve([first])
    text = first.request.prompt_ids.tolist() + first.text
    later = [Answer(text[:length], max_tokens=8, logprobs=2) for length in (40, 50, len(text))]
    expected = [Answer(text[:length], max_tokens=8, logprobs=2) for length in (40, 50, len(text))]
    serve(expected, enable_prefix_caching=False)
    again = Answer(first.request.prompt_ids.tolist(), max_tokens=60, logprobs=3, temperature=1.0, seed=3)
    oracle = Oracle([first], 0.4)
    options = device_options(oracle, 6) if place == "device" else {"speculator": oracle.speculator(6)}
    engine = make_engine(**options)
    engine.start()
    try:
        submit(engine, [again, *later])
            answer.wait()
    finally:
        assert engine.stop(grace_s=5.0)
    assert_clean(engine)
    _assert_equal([first, *expected], [again, *later])
    assert later[-1].deltas[0].num_cached_tokens >= (len(text) - 1) // 16 * 16


@pytest.mark.parametrize("place", _PLACES)
def test_a_cancel_in_the_middle_of_a_step_frees_the_drafts(place: str):
    """A request that is cancelled while its drafts are computed gets nothing more, and the others go on as before."""
    expected, actual = _reference(), _answers()
    engine: Engine

    def cancel(plan: Any) -> None:
        if plan.num_drafts.sum() > 20 and not actual[1].request.is_cancelled:
            engine.cancel(actual[1].request)
            engine.cancel(actual[7].request)

    oracle = Oracle(expected, 0.3)
    options = device_options(oracle, 4) if place == "device" else {"speculator": oracle.speculator(4)}
    engine = make_engine(before_step=cancel, **options)
    submit(engine, actual)
    rest = [index for index in range(len(actual)) if index not in (1, 7)]
    finish(engine, [actual[index] for index in rest])
    _assert_equal([expected[index] for index in rest], [actual[index] for index in rest])
    assert actual[1].request.is_cancelled
    assert not actual[1].is_ended


def test_tokens_of_a_step_come_as_one_delta():
    """Accepted drafts and the token after them are one delta, with log probabilities for each token."""
    expected = _answers(kinds=[{"temperature": 1.0, "seed": 3}])
    serve(expected)
    actual = _answers(kinds=[{"temperature": 1.0, "seed": 3}])
    _serve(actual, Oracle(expected, 0.0), 3, "host")
    sizes = [len(delta.token_ids) for delta in actual[0].deltas]
    assert [1, 4, 4, 4, 4, 4, 3] == sizes
    assert sizes == [len(delta.logprobs or []) for delta in actual[0].deltas]
    _assert_equal(expected, actual)


def test_a_stop_within_the_drafts_ends_the_answer():
    """Accepted drafts behind a stop token are no output, and are not counted."""
    (free,) = _answers(kinds=[{"temperature": 1.0, "seed": 3}])
    serve([free])
    stop = next(token for index, token in enumerate(free.text) if index > 3 and token not in free.text[:index])
    options = {"temperature": 1.0, "seed": 3, "stop_token_ids": (stop,)}
    (expected,), (actual,) = _answers(kinds=[options]), _answers(kinds=[options])
    serve([expected])
    engine = _serve([actual], Oracle([free], 0.0), 8, "host")
    _assert_equal([expected], [actual])
    assert ["stop"] == actual.reasons
    assert engine.metrics.num_output_tokens == len(expected.text)


@pytest.mark.parametrize("place", _PLACES)
def test_a_request_without_speculation_gets_no_drafts(place: str):
    """The sampling parameter 'speculation' set to none turns it off for this request alone."""
    expected = _answers(kinds=[{}, {}])
    serve(expected)
    actual = _answers(kinds=[{"speculation": "none"}, {}])
    plans = []
    _serve(actual, Oracle(expected, 0.0), 2, place, before_step=plans.append)
    assert [1] * 24 == [len(delta.token_ids) for delta in actual[0].deltas]
    assert max(len(delta.token_ids) for delta in actual[1].deltas) == 3
    _assert_equal(expected, actual)


@pytest.mark.parametrize("defect", ["positions", "samples"])
def test_a_defect_of_the_engine_would_be_seen(defect: str, monkeypatch: pytest.MonkeyPatch):
    """The equality could fail: it does if drafts are sampled one position off, or one too many is accepted."""
    expected, actual = _reference(), _answers()

    def spoil(plan: Any) -> None:
        if defect == "positions" and plan.num_drafts.any():
            plan.sample_positions[1:] += 1

    if defect == "samples":
        monkeypatch.setattr("weft.llm.scheduler.scheduler.num_accepted", lambda drafts, samples: len(drafts))
    _serve(actual, Oracle(expected, 0.3), 3, "host", before_step=spoil)
    assert [answer.tokens for answer in expected] != [answer.tokens for answer in actual]


def _permuted(cycle_len: int) -> TransformerModel:
    return TransformerModel(MODEL, permutation_weights(MODEL, 3, cycle_len=cycle_len), deterministic=True)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ngrams_of_a_permutation_are_accepted(temperature: float):
    """A model that goes through a cycle is proposed its cycle, from the second round on, and is never wrong at T=0."""
    successors = permutation(MODEL.vocab_size, 3, cycle_len=12)
    model = _permuted(12)
    make: Callable[[], list[Answer]] = lambda: [  # noqa: E731
        Answer([start], max_tokens=60, temperature=temperature, seed=start, logprobs=1) for start in (5, 17)
    ]
    expected, actual = make(), make()
    serve(expected, model=model)
    engine = serve(actual, model=model, speculator=Speculator("ngram", FixedDepth(4), NgramProposer))
    _assert_equal(expected, actual)
    assert engine.speculator is not None
    if not temperature:
        token = 5
        for new in actual[0].text:
            token = int(successors[token])
            assert new == token
        assert engine.speculator.num_drafts == engine.speculator.num_accepted > 60
    assert np.isfinite(engine.speculator.mean_accepted_len)


@pytest.mark.parametrize(
    ("has", "asks", "words"),
    [
        ("ngram", "draft", "speculation must be 'none' or 'ngram', which this model has, got 'draft'"),
        ("none", "ngram", "speculation must be 'none', got 'ngram'; this model has no other"),
        ("none", "x" * 9999, "got 'xxx"),
    ],
)
def test_a_proposer_that_the_model_has_not_is_refused(has: str, asks: str, words: str):
    """The message says what was asked for and what is allowed."""
    engine = make_engine(speculation=has)
    with pytest.raises(InvalidArgumentError) as caught:
        engine.submit(Answer([1], speculation=asks).request)
    assert words in caught.value.message
    assert len(caught.value.message) < 300
    for allowed in (None, "none", has):
        engine.submit(Answer([1], speculation=allowed).request)


@pytest.mark.parametrize("wrong", [3, True, ["ngram"], {}])
def test_a_speculation_that_is_no_text_is_refused(wrong: Any):
    """Sampling parameters have the type that they say."""
    with pytest.raises(InvalidArgumentError, match="sampling parameter speculation must be the name of a proposer"):
        SamplingParams(speculation=wrong)
