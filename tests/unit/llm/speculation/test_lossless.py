"""Draft model, Medusa heads and Lookahead: answers are those without them, and drafts that must be right are."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.unit.llm.engine_fixture import (
    Answer,
    MODEL,
    assert_clean,
    finish,
    make_engine,
    random_prompts,
    serve,
    submit,
)
from tests.unit.llm.permutation_model import permutation, permutation_weights
from tests.unit.llm.speculation.proposers import NAMES, Scripted, options, trained_heads
from tests.unit.llm.speculation_fixture import SAMPLING_KINDS

from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.request import Delta
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.medusa import MedusaProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator

_KINDS: list[dict[str, Any]] = [
    *SAMPLING_KINDS,
    {"temperature": 1.0, "seed": 9, "speculation": "none"},
    {"speculation": "none"},
]


def _answers(num_new: int = 24) -> list[Answer]:
    prompts = random_prompts(len(_KINDS), 3, 40, seed=9)
    return [
        Answer(prompt, max_tokens=num_new, logprobs=3, **kind) for prompt, kind in zip(prompts, _KINDS, strict=True)
    ]


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    """What an engine without speculation answers."""
    answers = _answers()
    serve(answers, max_num_seqs=16)
    return answers


def _assert_equal(expected: Sequence[Answer], actual: Sequence[Answer]) -> None:
    for one, other in zip(expected, actual, strict=True):
        assert one.tokens == other.tokens
        assert one.reasons == other.reasons
        assert one.logprobs == other.logprobs


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 8])
@pytest.mark.parametrize("name", NAMES)
def test_a_mixed_batch_is_as_without_drafts(name: str, num_drafts: int, expected: list[Answer]) -> None:
    """Greedy and sampled, penalties, biases, stops, several choices, two without speculation: bitwise equal."""
    answers, setup = _answers(), options(name, num_drafts)
    serve(answers, max_num_seqs=16, max_num_batched_tokens=256, **setup)
    _assert_equal(expected, answers)
    assert setup["speculator"].num_drafts > 20


@pytest.mark.parametrize("name", NAMES)
def test_chunks_and_preemption_change_nothing(name: str, expected: list[Answer]) -> None:
    """In steps of few tokens, and in a pool in which sequences preempt one another, answers are bitwise the same."""
    answers, setup = _answers(), options(name, 3)
    engine = serve(answers, max_num_seqs=4, max_num_batched_tokens=8, num_blocks=24, block_size=4, **setup)
    _assert_equal(expected, answers)
    assert engine.num_preemptions > 0
    assert setup["speculator"].num_drafts > 5


@pytest.mark.parametrize("name", NAMES)
def test_prefixes_of_drafts_are_found_again(name: str) -> None:
    """Prompts that continue earlier answers hit the cache, and are answered as without it."""
    first = [Answer(prompt, max_tokens=30) for prompt in random_prompts(3, 20, 30, seed=2)]
    engine = make_engine(block_size=4, **options(name, 4))
    engine.start()
    try:
        submit(engine, first)
        for answer in first:
            answer.wait()
        longer = [answer.request.prompt_ids.tolist() + answer.text for answer in first]
        second = [Answer(prompt, max_tokens=20, temperature=1.0, seed=7) for prompt in longer]
        submit(engine, second)
        for answer in second:
            answer.wait()
    finally:
        assert engine.stop(grace_s=5.0)
    assert_clean(engine)
    assert all(answer.deltas[0].num_cached_tokens >= 40 for answer in second)
    without = [Answer(prompt, max_tokens=20, temperature=1.0, seed=7) for prompt in longer]
    serve(without, enable_prefix_caching=False)
    assert [answer.text for answer in without] == [answer.text for answer in second]


def _all_accepted(speculator: Speculator) -> None:
    assert speculator.num_drafts > 20
    assert speculator.num_accepted == speculator.num_drafts


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
    _all_accepted(setup["speculator"])


def test_a_draft_model_follows_the_prefix_cache() -> None:
    """A prompt whose blocks come from a request without any draft is caught up on, and its drafts are right."""
    prompt = random_prompts(1, 60, 60, seed=6)[0]
    setup = options("self", 4)
    engine = make_engine(block_size=4, max_num_batched_tokens=256, **setup)
    engine.start()
    try:
        engine.submit((before := Answer(prompt, max_tokens=4, speculation="none")).request)
        before.wait()
        engine.submit((after := Answer(prompt, max_tokens=40)).request)
        after.wait()
    finally:
        assert engine.stop(grace_s=5.0)
    assert after.deltas[0].num_cached_tokens >= 56
    _all_accepted(setup["speculator"])


def test_a_draft_model_is_right_after_preemptions() -> None:
    """Sequences that lost their blocks and got them back have right drafts."""
    setup = options("self", 2)
    answers = [Answer(prompt, max_tokens=60) for prompt in random_prompts(3, 20, 20, seed=4)]

    def submit_all(delta: Delta) -> None:
        submit(engine, answers)

    first = Answer([1], max_tokens=1, on_delta=submit_all)
    engine = make_engine(num_blocks=7, watermark=0.0, max_num_seqs=3, **setup)
    engine.submit(first.request)
    finish(engine, [first, *answers])
    assert engine.num_preemptions > 0
    _all_accepted(setup["speculator"])


def test_a_draft_model_catches_up_after_steps_without_drafts() -> None:
    """After many steps in which nobody had drafts, the first drafts are right."""
    setup = options("self", Scripted([0] * 60 + [3]), max_num_tokens=512)
    serve([Answer(prompt, max_tokens=90) for prompt in random_prompts(3, 3, 40, seed=8)], **setup)
    _all_accepted(setup["speculator"])


@pytest.mark.parametrize("num_idle", [63, 64, 65, 150])
def test_a_draft_model_knows_what_happened_while_it_was_idle(num_idle: int) -> None:
    """Copies, forks, preemptions and reused blocks of many steps without drafts leave no stale key behind."""
    setup = options("self", Scripted([0] * num_idle + [3]), max_num_tokens=512)
    prompts = random_prompts(9, 3, 40, seed=8)
    answers = [
        Answer(prompt, max_tokens=10 * (number + 1), temperature=1.0, seed=number, n=1 + number % 2)
        for number, prompt in enumerate(prompts)
    ]
    serve(answers, max_num_seqs=6, num_blocks=40, block_size=4, max_num_batched_tokens=32, **setup)
    _all_accepted(setup["speculator"])


@pytest.mark.parametrize("name", ["draft", "medusa"])
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


def test_heads_know_where_to_begin_after_steps_without_drafts() -> None:
    """The first drafts after steps without any are as good as others, also of a sequence that others have left."""
    config = replace(MODEL, vocab_size=32, max_position_embeddings=64)
    weights = permutation_weights(config, 1, epsilon=0.0)
    model = TransformerModel(config, dict(weights), deterministic=True)
    heads = trained_heads(model, weights, 1, num_heads=3)
    speculator = Speculator("medusa", Scripted([3, 0, 0, 0] * 10))
    answers = [Answer([start], max_tokens=12 + 7 * start) for start in range(4)]
    serve(answers, model=model, speculator=speculator, proposer=MedusaProposer(model, heads))
    assert speculator.num_drafts > 20
    assert speculator.num_accepted >= 0.9 * speculator.num_drafts


def test_catching_up_takes_bounded_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt is caught up on in several steps, none beyond the bound; its drafts are right once it has."""
    model, sizes = TransformerModel(MODEL, _weights(), deterministic=True), []
    forward = model.forward

    def watched(token_ids: Any, *rest: Any) -> Any:
        sizes.append(len(token_ids))
        return forward(token_ids, *rest)

    monkeypatch.setattr(model, "forward", watched)
    setup = options("draft", 2, model=model, max_num_tokens=7)
    answer = Answer(random_prompts(1, 90, 90, seed=3)[0], max_tokens=60)
    serve([answer], max_num_batched_tokens=128, **setup)
    assert max(sizes) == 7
    speculator = setup["speculator"]
    assert speculator.num_drafts - speculator.num_accepted <= 2 * -(-90 // 5)
    assert speculator.num_accepted > 20


def _weights() -> dict[str, Any]:
    return dict(random_weights(MODEL, seed=3))


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


def test_trained_heads_are_accepted() -> None:
    """Heads that were trained on what the model says get nearly all drafts accepted, at T=0 and T=0.5."""
    config = replace(MODEL, vocab_size=32, max_position_embeddings=64)
    weights = permutation_weights(config, 1, epsilon=0.0)
    model = TransformerModel(config, dict(weights), deterministic=True)
    heads = trained_heads(model, weights, 1, num_heads=3)
    for temperature in (0.0, 0.5):
        speculator = Speculator("medusa", FixedDepth(3))
        answers = [Answer([start], max_tokens=40, temperature=temperature, seed=start) for start in range(3)]
        without = [Answer([start], max_tokens=40, temperature=temperature, seed=start) for start in range(3)]
        serve(answers, model=model, speculator=speculator, proposer=MedusaProposer(model, heads))
        serve(without, model=model)
        assert [answer.text for answer in without] == [answer.text for answer in answers]
        assert speculator.num_accepted >= 0.9 * speculator.num_drafts


def test_drafts_share_the_noise_of_the_target() -> None:
    """At T=1 a draft model close to the target has more drafts accepted than with noise of its own."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in _weights().items()
    }
    shares = []
    for is_shared in (True, False):
        setup = options("draft", 2, model=TransformerModel(MODEL, dict(weights)))
        proposer = setup["proposer"]
        if not is_shared:
            _salt(proposer)
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


@pytest.mark.parametrize("name", NAMES)
def test_a_cancelled_request_leaves_nothing_behind(name: str) -> None:
    """Cancelling in the middle of drafts frees all blocks, and the others are answered as alone."""
    engine = make_engine(**options(name, 4))
    kept = Answer([5, 6, 7], max_tokens=40)
    cancelled = Answer([1, 2, 3], max_tokens=200, on_delta=lambda delta: engine.cancel(delta.request))
    engine.submit(cancelled.request)
    engine.submit(kept.request)
    finish(engine, [kept])
    without = Answer([5, 6, 7], max_tokens=40)
    serve([without])
    assert kept.text == without.text
