"""What the engine's metrics say of scripted times, and of a real run."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.unit.llm.engine_fixture import MODEL, Answer, answer_all, finish, make_engine, random_prompts, serve, submit

from weft.base.statistics import GENERATION_BUCKETS_S, LatencyHistogram
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, is_matrix
from weft_kernels.linear.quantizers import quantize

_MS = 1_000_000
_PROMPTS = random_prompts(3, 20, 20)


class _Clock:
    """Moves only when told: by 10 ms in every step."""

    def __init__(self) -> None:
        self.now_ns = 1000 * _MS

    def __call__(self) -> int:
        return self.now_ns

    def tick(self, plan: Any) -> None:
        self.now_ns += 10 * _MS


def test_latencies_of_a_queue_of_two():
    """With one slot and steps of 10 ms the second request waits for the four steps of the first."""
    clock = _Clock()
    engine = make_engine(clock_ns=clock, before_step=clock.tick, max_num_seqs=1)
    answers = [Answer(prompt, max_tokens=4) for prompt in _PROMPTS[:2]]
    answer_all(engine, answers)
    metrics = engine.metrics
    times = {
        "queue_time": (0.0, 0.04),
        "ttft": (0.01, 0.05),
        "itl": (0.01,) * 6,
        "tpot": (0.01,) * 2,
        "e2e": (0.04, 0.08),
    }
    for name, seconds in times.items():
        expected = LatencyHistogram(GENERATION_BUCKETS_S)
        for each in seconds:
            expected.observe(each)
        histogram = getattr(metrics, name)
        assert (name, expected.counts) == (name, histogram.counts)
        assert (name, pytest.approx(expected.sum_s)) == (name, histogram.sum_s)
    assert (8, 8, 40 + 6) == (metrics.num_steps, metrics.num_output_tokens, metrics.num_computed_tokens)
    assert (40, 2, {"length": 2}) == (metrics.num_prompt_tokens, metrics.num_good_requests, metrics.outcomes)
    assert 80 * _MS == metrics.busy_ns


def test_choices_of_a_request_are_counted_each():
    """Three choices have one time to first token, two times between tokens each, and a TPOT each."""
    clock = _Clock()
    engine = make_engine(clock_ns=clock, before_step=clock.tick)
    answer = Answer(_PROMPTS[0], n=3, temperature=1.0, max_tokens=3)
    answer_all(engine, [answer])
    metrics = engine.metrics
    assert (1, 6, 3, 9) == (metrics.ttft.count, metrics.itl.count, metrics.tpot.count, metrics.num_output_tokens)


def test_occupancy_of_each_step():
    """Who runs and waits, and the blocks in use, in each step."""
    shapes: list[tuple[int, ...]] = []

    def note(plan: ForwardPlan) -> None:
        shapes.append(
            (len(plan.slots), len(plan.token_ids), engine.num_running, engine.num_waiting, engine.pool.num_used)
        )

    engine = make_engine(before_step=note, max_num_seqs=2, num_blocks=20)
    answers = [Answer(p, max_tokens=2) for p in _PROMPTS]
    answer_all(engine, answers)
    assert [(2, 40, 2, 1, 4), (2, 2, 2, 1, 4), (1, 20, 1, 0, 2), (1, 1, 1, 0, 2)] == shapes
    assert (19, 0) == (engine.pool.capacity, engine.pool.num_used)


@pytest.mark.parametrize(
    ("slo", "is_good"),
    [
        ({}, True),
        ({"slo_ttft_ms": 10.0, "slo_tpot_ms": 10.0}, True),
        ({"slo_ttft_ms": 9.9}, False),
        ({"slo_tpot_ms": 9.9}, False),
    ],
)
@pytest.mark.parametrize("is_requests_own", [False, True])
def test_goodput_is_what_keeps_its_promises(slo: dict[str, float], is_good: bool, is_requests_own: bool):
    """A request is good if it kept both promises, its own or else the engine's."""
    clock = _Clock()
    own, others = (slo, dict.fromkeys(slo, 1.0)) if is_requests_own else ({}, slo)
    engine = make_engine(clock_ns=clock, before_step=clock.tick, **others)  # type: ignore[arg-type]
    before = engine.metrics.totals(clock())
    answer = Answer(_PROMPTS[0], max_tokens=5, **own)  # type: ignore[arg-type]
    answer_all(engine, [answer])
    rates = engine.metrics.rates(before, engine.metrics.totals(clock()))
    assert (is_good / 0.05, 5 / 0.05) == pytest.approx((rates.goodput_per_s, rates.tokens_per_s))


def test_a_request_without_an_answer_is_not_good():
    """Cancelled and expired requests count by their outcome, never as good, and have no time to first token."""
    clock = _Clock()
    engine = make_engine(clock_ns=clock, before_step=clock.tick, max_num_seqs=1)
    answers = [Answer(p, max_tokens=3) for p in _PROMPTS]
    answers[1].request.deadline_ns = clock() + 5 * _MS
    submit(engine, answers)
    engine.cancel(answers[2].request)
    finish(engine, answers[:2])
    assert {"cancelled": 1, "DEADLINE_EXCEEDED": 1, "length": 1} == engine.metrics.outcomes
    assert 1 == engine.metrics.num_good_requests
    assert 1 == engine.metrics.ttft.count


def test_hit_rate_is_the_share_of_prompt_tokens():
    """Of two equal prompts of 33 tokens one is read and two blocks of the other are found."""
    engine = serve([Answer([*_PROMPTS[0], *_PROMPTS[1]][:33], max_tokens=2) for _ in range(2)], max_num_seqs=2)
    assert 32 / 66 == engine.metrics.hit_rate


def test_use_of_the_hardware_where_peaks_are_known():
    """MFU and MBU are what steps could not do without over what the device could do in their time; else absent."""
    clock, plans = _Clock(), []

    def tick(plan: ForwardPlan) -> None:
        clock.tick(plan)
        plans.append(plan)

    engine = make_engine(clock_ns=clock, before_step=tick, peak_flops_per_s=1e9)
    before = engine.metrics.totals(clock())
    answer = Answer(_PROMPTS[0], max_tokens=3)
    answer_all(engine, [answer])
    rates = engine.metrics.rates(before, engine.metrics.totals(clock()))
    flops = sum(
        MODEL.flops(np.diff(plan.q_start).astype(np.int64), plan.ctx_len.astype(np.int64), len(plan.sample_rows))
        for plan in plans
    )
    assert flops / 0.03 / 1e9 == rates.mfu
    assert rates.mbu is None


def test_cost_of_a_step():
    """A prompt of 3 tokens and a sequence with 1 new token of 5, counted by hand; windows cut what attention sees."""
    model = replace(MODEL, num_layers=1)
    layer = 32 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * 48
    num_new, context = np.array([1, 3]), np.array([5, 3])
    assert layer == model.num_multiplied
    assert 2 * (4 * layer + 2 * 32 * 96) + 4 * 32 * (5 + (1 + 2 + 3)) == model.flops(num_new, context, 2)
    assert 8 * (2 * 16 * 2) == model.read_kv_bytes(num_new, context, "bfloat16")
    model = replace(MODEL, sliding_window=2, sliding_layers=(True, False))
    assert 4 * 32 * (11 + 2 + (1 + 2 + 2)) == model.attention_flops(num_new, context)
    assert (8 + 2 + 3) * (2 * 16 * 2) == model.read_kv_bytes(num_new, context, "bfloat16")


@pytest.mark.parametrize("num_bits", [0, 4, 8])
def test_bytes_of_matrices_are_those_of_their_codes(num_bits: int) -> None:
    """A model rounded to few bits reads its codes and scales in a step, and MBU counts these."""
    weights = random_weights(MODEL, seed=1)
    matrices = {name: weight for name, weight in weights.items() if is_matrix(name)}
    matrices.setdefault(LM_HEAD, weights[EMBEDDING])
    expected = sum(weight.nbytes for weight in matrices.values())
    if num_bits:
        bits = {LM_HEAD: 8}
        expected = sum(quantize(each, bits.get(name, num_bits)).num_bytes for name, each in matrices.items())
    model = TransformerModel(MODEL, dict(weights), num_bits=num_bits)
    assert expected == model.matrix_bytes
