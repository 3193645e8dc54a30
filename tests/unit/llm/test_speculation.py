"""Speculation: tokens, log probabilities, reasons and counts are those without it, whatever the drafts are."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import (
    MODEL,
    Answer,
    answer_in_turn,
    assert_equal,
    finish,
    make_engine,
    preempt,
    random_prompts,
    serve,
    submit,
)
from tests.unit.llm.permutation_model import permutation, permutation_weights
from tests.unit.llm.speculation.proposers import (
    NAMES,
    SAMPLING_KINDS,
    Oracle,
    Scripted,
    options,
)

from weft.base.errors import InvalidArgumentError
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.ngram import NgramProposer
from weft.llm.speculation.speculator import DraftBalance, FixedDepth, Speculator

#: Proposers of a model, and one on the host that knows the answers and errs in three of ten.
_ALL = pytest.mark.parametrize("name", ["host", *NAMES])
_KINDS: list[dict[str, Any]] = [
    *SAMPLING_KINDS,
    {"min_tokens": 5, "stop_token_ids": tuple(range(60)), "frequency_penalty": 0.3},
    {"allowed_token_ids": tuple(range(0, 90, 2)), "bad_words": ((4,), (8, 10), (2, 6, 12), (16, 16))},
    {"temperature": 1.0, "seed": 9, "speculation": "none"},
    {"speculation": "none"},
]
_SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def _answers(num_new: int = 24, kinds: Sequence[dict[str, Any]] = _KINDS) -> list[Answer]:
    prompts = random_prompts(len(kinds), 3, 40, seed=9)
    return [Answer(prompt, max_tokens=num_new, logprobs=3, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


def _with(name: str, expected: Sequence[Answer], num_drafts: int, error_rate: float = 0.3) -> dict[str, Any]:
    """Options of an engine with the proposer."""
    if name == "host":
        return {"speculator": Oracle(expected, error_rate).speculator(num_drafts)}
    return options(name, num_drafts)


@cache
def _reference() -> list[Answer]:
    """The answers without speculation."""
    answers = _answers()
    serve(answers)
    return answers


def _assert_accepted(name: str, setup: dict[str, Any], least: int = 5) -> None:
    """As many drafts were accepted as the proposer's are right: all, some, or any number."""
    speculator = setup["speculator"]
    assert speculator.num_drafts > least
    if name == "self":
        assert speculator.num_accepted == speculator.num_drafts
    elif name in ("host", "close"):
        assert 0 < speculator.num_accepted < speculator.num_drafts
        assert 1 < speculator.mean_accepted_len


@pytest.mark.parametrize(
    ("name", "num_drafts"), [*product(["host", *NAMES], [1, 2, 3, 8]), *(("host", depth) for depth in range(4, 8))]
)
def test_a_mixed_batch_is_as_without_drafts(name: str, num_drafts: int) -> None:
    """Greedy and sampled, penalties, biases, stops, several choices, two without speculation: bitwise equal."""
    expected, actual = _reference(), _answers()
    setup = _with(name, expected, num_drafts)
    serve(actual, max_num_seqs=16, max_num_batched_tokens=256, **setup)
    assert_equal(expected, actual)
    if name != "self":  # which may err where penalties change the target's choice
        _assert_accepted(name, setup, 20)


@pytest.mark.parametrize("engine", [
    {"max_num_seqs": 6, "max_num_batched_tokens": 8},
    {"max_num_seqs": 6, "max_num_batched_tokens": 17},
    {"max_num_seqs": 4, "max_num_batched_tokens": 8, "num_blocks": 24, "block_size": 4},
])  # fmt: skip
@_ALL
def test_chunks_and_preemption_change_nothing(name: str, engine: dict[str, Any]) -> None:
    """In steps of few tokens, and in a pool in which sequences preempt one another, answers are bitwise the same."""
    expected, actual, plans = _reference(), _answers(), []
    setup = _with(name, expected, 3)
    made = serve(actual, before_step=plans.append, **engine, **setup)
    assert_equal(expected, actual)
    assert max(len(plan.token_ids) for plan in plans) <= engine["max_num_batched_tokens"]
    assert ("num_blocks" in engine) == (made.num_preemptions > 0)
    assert setup["speculator"].num_drafts > 5


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@_ALL
def test_preempted_with_drafts_is_as_undisturbed(name: str, enable_prefix_caching: bool) -> None:
    """In a pool of 1.2 times one sequence, three take turns, and drafts take what is left; nothing is different."""
    # A draft model that is the target knows nothing of penalties.
    penalties = {} if name == "self" else {"frequency_penalty": 0.5}
    kinds: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 1}, {"temperature": 1.0, "seed": 2} | penalties]
    prompts = random_prompts(3, 20, 20, seed=4)
    expected, actual = (
        [Answer(prompt, max_tokens=60, logprobs=1, **kind) for prompt, kind in zip(prompts, kinds, strict=True)]
        for _ in range(2)
    )
    serve(expected)
    setup = _with(name, expected, 4 if name == "host" else 2)
    preempt(actual, enable_prefix_caching=enable_prefix_caching, **setup)
    assert_equal(expected, actual)
    _assert_accepted(name, setup)


@pytest.mark.parametrize("error_rate", [0.0, 1.0])
def test_right_drafts_make_fewer_steps_and_wrong_ones_no_more(error_rate: float) -> None:
    """With four drafts that are all right, a third of the steps; with four that are all wrong, as many as without."""
    expected, actual = _answers(kinds=_KINDS[:5]), _answers(kinds=_KINDS[:5])
    without = serve(expected)
    engine = serve(actual, **_with("host", expected, 4, error_rate))
    assert_equal(expected, actual)
    assert engine.metrics.num_output_tokens == without.metrics.num_output_tokens == 5 * 24
    if error_rate:
        assert engine.metrics.num_steps == without.metrics.num_steps
    else:
        assert engine.metrics.num_steps <= without.metrics.num_steps / 3


@pytest.mark.parametrize("name", ["host", "self"])
@pytest.mark.parametrize(
    "engine",
    [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}, {"quantization": "int8"}, {"quantization": "int4"}],
    ids=lambda engine: "".join(engine.values()),
)
def test_rounded_models_are_as_without_drafts(name: str, engine: dict[str, str]) -> None:
    """Bitwise equal with 16-bit numbers, 8-bit caches and low-bit weights too."""
    expected, actual = _answers(), _answers()
    serve(expected, **engine)
    setup = _with(name, expected, 4)
    serve(actual, **engine, **setup)
    assert_equal(expected, actual)
    assert setup["speculator"].num_accepted > 0


@_ALL
def test_prefixes_that_drafts_wrote_are_found_again(name: str) -> None:
    """Blocks of accepted drafts serve later prompts from the cache; those of rejected ones are never found."""
    (first,) = _answers(kinds=[_SAMPLED], num_new=60)
    serve([first])
    text = first.request.prompt_ids.tolist() + first.text
    later, expected = (
        [Answer(text[:length], max_tokens=20, logprobs=2, **_SAMPLED) for length in (40, 50, len(text))]
        for _ in range(2)
    )
    serve(expected, enable_prefix_caching=False)
    (again,) = _answers(kinds=[_SAMPLED], num_new=60)
    setup = _with(name, [first], 4)
    answer_in_turn(make_engine(block_size=4, **setup), [[answer] for answer in (again, *later)])
    assert_equal([first, *expected], [again, *later])
    assert later[-1].deltas[0].num_cached_tokens >= (len(text) - 1) // 4 * 4
    assert setup["speculator"].num_drafts > 20


@_ALL
def test_a_cancel_in_the_middle_of_a_step_frees_the_drafts(name: str) -> None:
    """A request that is cancelled while its drafts are computed gets nothing more, and the others go on as before."""
    expected, actual = _reference(), _answers()

    def cancel(plan: Any) -> None:
        if plan.num_drafts.sum() > 8 and not actual[1].request.is_cancelled:
            engine.cancel(actual[1].request)
            engine.cancel(actual[7].request)

    engine = make_engine(before_step=cancel, **_with(name, expected, 4))
    submit(engine, actual)
    rest = [index for index in range(len(actual)) if index not in (1, 7)]
    finish(engine, [actual[index] for index in rest])
    assert_equal([expected[index] for index in rest], [actual[index] for index in rest])
    assert actual[1].request.is_cancelled
    assert not actual[1].is_ended


def test_tokens_of_a_step_come_as_one_delta() -> None:
    """Accepted drafts and the token after them are one delta, with log probabilities for each token."""
    (expected,), (actual,) = _answers(kinds=[_SAMPLED]), _answers(kinds=[_SAMPLED])
    serve([expected])
    serve([actual], **_with("host", [expected], 3, 0.0))
    sizes = [len(delta.token_ids) for delta in actual.deltas]
    assert [1, 4, 4, 4, 4, 4, 3] == sizes == [len(delta.logprobs or []) for delta in actual.deltas]
    assert_equal([expected], [actual])


def test_a_stop_within_the_drafts_ends_the_answer() -> None:
    """Accepted drafts behind a stop token are no output, and are not counted."""
    (free,) = _answers(kinds=[_SAMPLED])
    serve([free])
    stop = next(token for index, token in enumerate(free.text) if index > 3 and token not in free.text[:index])
    stops = _SAMPLED | {"stop_token_ids": (stop,)}
    (expected,), (actual,) = _answers(kinds=[stops]), _answers(kinds=[stops])
    serve([expected])
    engine = serve([actual], **_with("host", [free], 8, 0.0))
    assert_equal([expected], [actual])
    assert ["stop"] == actual.reasons
    assert engine.metrics.num_output_tokens == len(expected.text)


@pytest.mark.parametrize("name", ["host", "self"])
def test_a_request_without_speculation_gets_no_drafts(name: str) -> None:
    """The sampling parameter 'speculation' set to none turns it off for this request alone."""
    expected, actual = _answers(kinds=[{}, {}]), _answers(kinds=[{"speculation": "none"}, {}])
    serve(expected)
    serve(actual, **_with(name, expected, 2, 0.0))
    assert [1] * 24 == [len(delta.token_ids) for delta in actual[0].deltas]
    assert max(len(delta.token_ids) for delta in actual[1].deltas) == 3
    assert_equal(expected, actual)


@pytest.mark.parametrize("defect", ["positions", "samples"])
def test_a_defect_of_the_engine_would_be_seen(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality could fail: it does if drafts are sampled one position off, or one too many is accepted."""
    expected, actual = _reference(), _answers()

    def spoil(plan: Any) -> None:
        if defect == "positions" and plan.num_drafts.any():
            plan.sample_positions[1:] += 1

    if defect == "samples":
        monkeypatch.setattr("weft.llm.scheduler.scheduler.num_accepted", lambda drafts, samples: len(drafts))
    serve(actual, before_step=spoil, **_with("host", expected, 3))
    assert [answer.tokens for answer in expected] != [answer.tokens for answer in actual]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_model_that_is_the_target_is_always_right(temperature: float) -> None:
    """Its keys and values follow chunks, forks, copies and cached prefixes: one stale entry would make drafts wrong."""
    shared = random_prompts(1, 50, 50, seed=4)[0]
    prompts = [*random_prompts(4, 3, 60, seed=5), *([*shared, number] for number in range(3))]
    answers = [
        Answer(prompt, max_tokens=31, temperature=temperature, seed=number, n=1 + number % 3)
        for number, prompt in enumerate(prompts)
    ]
    setup = options("self", 3)
    serve(answers, max_num_seqs=8, max_num_batched_tokens=20, block_size=4, **setup)
    _assert_accepted("self", setup, 20)


def test_a_draft_model_follows_the_prefix_cache() -> None:
    """A prompt whose blocks come from a request without any draft is caught up on, and its drafts are right."""
    prompt = random_prompts(1, 60, 60, seed=6)[0]
    before, after = Answer(prompt, max_tokens=4, speculation="none"), Answer(prompt, max_tokens=40)
    setup = options("self", 4)
    answer_in_turn(make_engine(block_size=4, max_num_batched_tokens=256, **setup), [[before], [after]])
    assert after.deltas[0].num_cached_tokens >= 56
    _assert_accepted("self", setup, 20)


@pytest.mark.parametrize("num_idle", [60, 63, 64, 65, 150])
def test_a_draft_model_knows_what_happened_while_it_was_idle(num_idle: int) -> None:
    """Copies, forks, preemptions and reused blocks of many steps without drafts leave no stale key behind."""
    setup = options("self", Scripted([0] * num_idle + [3]), max_num_tokens=512)
    answers = [
        Answer(prompt, max_tokens=10 * (number + 1), temperature=1.0, seed=number, n=1 + number % 2)
        for number, prompt in enumerate(random_prompts(9, 3, 40, seed=8))
    ]
    serve(answers, max_num_seqs=6, num_blocks=40, block_size=4, max_num_batched_tokens=32, **setup)
    _assert_accepted("self", setup, 20)


@pytest.mark.parametrize("name", ["draft", "eagle3", "mtp"])
def test_a_step_without_drafts_costs_a_proposer_nothing_on_the_device(name: str) -> None:
    """In 40 steps of the same sequences, a proposer whose drafts nobody wants puts nothing on the device."""
    setup = options(name, FixedDepth(0))
    num_uploads, state = [0], setup["proposer"].bind

    def bind(state_: Any, *rest: Any) -> None:
        state(state_, *rest)
        setup["proposer"]._state = _Counting(state_, num_uploads)

    setup["proposer"].bind = bind
    serve([Answer(prompt, max_tokens=40) for prompt in random_prompts(3, 5, 5, seed=8)], **setup)
    assert num_uploads[0] <= 8  # sequences come and go


class _Counting:
    """A device state that counts its uploads."""

    def __init__(self, state: Any, count: list[int]) -> None:
        self._state, self._count = state, count

    def __getattr__(self, name: str) -> Any:
        self._count[0] += name == "upload"
        return getattr(self._state, name)


def test_catching_up_takes_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is caught up on in several steps, none beyond the bound; its drafts are right once it has."""
    model, sizes = TransformerModel(MODEL, dict(random_weights(MODEL, seed=3)), deterministic=True), []
    forward = model.forward

    def watched(token_ids: Any, *rest: Any, **named: Any) -> Any:
        sizes.append(len(token_ids))
        return forward(token_ids, *rest, **named)

    monkeypatch.setattr(model, "forward", watched)
    setup = options("draft", 2, model=model, max_num_tokens=7)
    answer = Answer(random_prompts(1, 90, 90, seed=3)[0], max_tokens=60)
    serve([answer], max_num_batched_tokens=128, **setup)
    assert max(sizes) == 7
    speculator = setup["speculator"]
    assert speculator.num_drafts - speculator.num_accepted <= 2 * -(-90 // 5)
    assert speculator.num_accepted > 20


@pytest.mark.parametrize("corrupted", [0.0, 0.25, 0.5])
def test_acceptance_is_that_of_the_draft_model(corrupted: float) -> None:
    """A draft model that errs at a share r of the tokens has (1-r) + ... + (1-r)^k of k drafts accepted on average."""
    config = replace(MODEL, max_position_embeddings=512)
    model = TransformerModel(config, permutation_weights(config, 1), deterministic=True)
    draft = TransformerModel(config, permutation_weights(config, 1, corrupted=corrupted))
    num_drafts, speculator = 3, Speculator("draft", FixedDepth(3))
    proposer = DraftModelProposer(draft, 256)
    answers = [Answer([start], max_tokens=200) for start in (0, 11, 29)]
    serve(answers, model=model, speculator=speculator, proposer=proposer)
    following = permutation(config.vocab_size, 1)
    for answer in answers:
        known = [*answer.request.prompt_ids.tolist(), *answer.text]
        assert known[1:] == following[known[:-1]].tolist()
    wanted = sum((1 - corrupted) ** place for place in range(1, num_drafts + 1))
    assert speculator.mean_accepted_len == pytest.approx(1 + wanted, rel=0.12)


def test_drafts_share_the_noise_of_the_target() -> None:
    """At T=1 a draft model close to the target has more drafts accepted than with noise of its own."""
    shares = []
    for is_shared in (True, False):
        setup = options("close", 2)
        if not is_shared:
            _salt(setup["proposer"])
        answers = [Answer(prompt, max_tokens=60, temperature=1.0, seed=3) for prompt in random_prompts(3, 3, 9)]
        serve(answers, **setup)
        shares.append(setup["speculator"].num_accepted / setup["speculator"].num_drafts)
    assert shares[0] > 0.7
    assert shares[1] < 0.3


def _salt(proposer: DraftModelProposer) -> None:
    """Its noise is another."""
    bind = proposer.bind

    def bound(state: Any, num_blocks: int, block_size: int) -> None:
        class Salted:
            def __getattr__(self, name: str) -> Any:
                return getattr(state, name)

            def sampling(self, slots: Any) -> Any:
                rows = state.sampling(slots)
                return rows._replace(seeds=rows.seeds + 1000)

        bind(Salted(), num_blocks, block_size)  # type: ignore[arg-type]

    proposer.bind = bound  # type: ignore[method-assign]


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
    assert_equal(expected, actual)
    assert engine.speculator is not None
    if not temperature:
        token = 5
        for new in actual[0].text:
            token = int(successors[token])
            assert new == token
        assert engine.speculator.num_drafts == engine.speculator.num_accepted > 60
    assert np.isfinite(engine.speculator.mean_accepted_len)


@pytest.mark.parametrize(("drafted_s", "stops"), [(1.2, False), (9.0, True)])
def test_drafts_that_lose_time_stop_and_the_text_is_the_same(drafted_s: float, stops: bool) -> None:
    """Steps of one second, and of ``drafted_s`` with drafts, of which half are right."""
    expected, actual = ([Answer([1, 2, 3], max_tokens=100)] for _ in range(2))
    serve(expected)
    now_s = [0.0]

    def run(plan: ForwardPlan) -> None:
        now_s[0] += drafted_s if plan.num_drafts.any() else 1.0

    speculator = Oracle(expected, 0.5).speculator(2, DraftBalance(), lambda: now_s[0])
    serve(actual, speculator=speculator, before_step=run)
    assert_equal(expected, actual)
    assert (speculator.num_checks <= 2) == stops
    assert speculator.num_checks > 20 or stops


@pytest.mark.parametrize("has", ["none", "ngram"])
def test_a_proposer_that_the_model_has_may_be_asked_for(has: str) -> None:
    """By its name, by none, or not at all; others are refused (``refused.txt``)."""
    engine = make_engine(speculation=has)
    submit(engine, [Answer([1], speculation=allowed) for allowed in (None, "none", has)])
    with pytest.raises(InvalidArgumentError, match="got 'xxx"):
        submit(engine, [Answer([1], speculation="x" * 9999)])
