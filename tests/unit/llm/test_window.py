"""Sequences of models with a sliding window: blocks behind it are freed, and nothing else changes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.unit.llm.engine_fixture import (
    MODEL,
    Answer,
    answer_all,
    assert_equal,
    finish,
    make_engine,
    preempt,
    random_prompts,
)

from weft.llm.config import KvWindow, kv_window
from weft.llm.engine import Engine
from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.runner import ModelRunner

_WINDOW, _BLOCK_SIZE, _NUM_STEP_TOKENS = 24, 4, 16
_WINDOWED = replace(MODEL, sliding_window=_WINDOW)
#: Blocks of a window and a step, and the null block: the smallest pool for texts of any length.
_NUM_BLOCKS = (_WINDOW + _NUM_STEP_TOKENS) // _BLOCK_SIZE + 1 + 1
_OPTIONS = {"block_size": _BLOCK_SIZE, "max_num_seqs": 4, "max_num_batched_tokens": _NUM_STEP_TOKENS, "watermark": 0.0}


def _model(**fields: object) -> TransformerModel:
    config = replace(_WINDOWED, **fields)  # type: ignore[arg-type]
    return TransformerModel(config, random_weights(config, seed=3), deterministic=True)


_MODEL = _model()


def _make(num_blocks: int = _NUM_BLOCKS, **options: object) -> Engine:
    return make_engine(model=_MODEL, num_blocks=num_blocks, **_OPTIONS | options)  # type: ignore[arg-type]


def _run(engine: Engine, answers: Sequence[Answer]) -> Engine:
    answer_all(engine, answers)
    return engine


def _answers(count: int = 3, num_prompt: int = 60, **params: object) -> list[Answer]:
    prompts = random_prompts(count, num_prompt, num_prompt, seed=4)
    options = {"max_tokens": 120, "logprobs": 1, "seed": 5, "temperature": 1.0} | params
    return [Answer(prompt, **options) for prompt in prompts]  # type: ignore[arg-type]


def _unfreed(**params: object) -> list[Answer]:
    """Answers of an engine that keeps every block."""
    answers = _answers(**params)  # type: ignore[arg-type]
    engine = _make(256, enable_prefix_caching=False)
    engine.pool.window = KvWindow(block_size=_BLOCK_SIZE)
    _run(engine, answers)
    return answers


@pytest.mark.parametrize(
    ("num_blocks", "enable_prefix_caching", "answers"),
    [
        (_NUM_BLOCKS, True, {}),
        (_NUM_BLOCKS, False, {}),
        (30, True, {}),
        *((40, True, {"count": 1, "num_prompt": n, "n": 3, "max_tokens": 40}) for n in range(40, 45)),
    ],
)
def test_a_long_text_runs_in_a_pool_of_few_windows(num_blocks: int, enable_prefix_caching: bool, answers: dict):
    """Texts of 180 tokens in a pool for 44 or 116, and forks at any place of a block, are those of an unfreed run."""
    actual = _answers(**answers)
    engine = _run(_make(num_blocks, enable_prefix_caching=enable_prefix_caching), actual)
    assert engine.pool.capacity == num_blocks - 1
    assert num_blocks != 30 or engine.num_preemptions == 0
    assert_equal(_unfreed(**answers), actual)


def test_preempted_equals_undisturbed():
    """Where the engine expects short answers, long ones are preempted, and are bitwise those of an unfreed run."""
    answers = _answers(num_prompt=8)
    preempt(answers, model=_MODEL, num_blocks=16, **_OPTIONS | {"max_num_seqs": 4})
    assert_equal(_unfreed(num_prompt=8), answers)


def test_a_hit_needs_the_last_window():
    """A prompt that goes on from another's text finds its end cached, though its beginning has been evicted."""
    (first,) = _answers(1)
    engine = _make()
    engine.submit(first.request)
    engine.start()
    prompt = [*first.wait().request.prompt_ids.tolist(), *first.text]
    warm, cold = (Answer(prompt, max_tokens=9, logprobs=1) for _ in range(2))
    engine.submit(warm.request)
    warm.wait()
    assert engine.stop(grace_s=5.0)
    _run(_make(256, enable_prefix_caching=False), [cold])
    assert 176 == warm.deltas[0].num_cached_tokens
    assert_equal([cold], [warm])


def test_nothing_reads_a_freed_block():
    """Where every block that nobody owns is full of NaN before each step, the tokens are the same."""
    answers = _answers()
    engine = _make(30, enable_prefix_caching=False)
    runner: ModelRunner = engine._runner  # type: ignore[assignment]
    num_poisoned = 0

    def poison(plan: object) -> None:
        nonlocal num_poisoned
        free = [block for block in range(1, 30) if not engine.pool.num_owners(block)]
        num_poisoned += len(free)
        with torch.inference_mode():
            runner.kv[free] = float("nan")

    runner.before_step = poison  # type: ignore[attr-defined]
    _run(engine, answers)
    assert num_poisoned
    assert_equal(_unfreed(), answers)


def test_a_long_answer_does_not_evict_the_prefixes_of_prompts():
    """What a long answer leaves behind its window is not cached, so another prompt's blocks still are."""
    (prompt,) = random_prompts(1, 20, 20, seed=8)
    before, again = (Answer(prompt, max_tokens=1) for _ in range(2))
    long = _answers(1, num_prompt=8)[0]
    order: list[Callable[[], None]] = [lambda: engine.submit(long.request), lambda: engine.submit(again.request)]
    before._on_delta = long._on_delta = lambda delta: order.pop(0)() if delta.is_last else None
    engine = _make(24)
    engine.submit(before.request)
    finish(engine, [before, long, again])
    assert 16 == again.deltas[0].num_cached_tokens


def test_a_layer_without_a_window_reads_everything():
    """Blocks are freed only if each layer has a window, and then those behind the widest."""
    config = _make()._core.scheduler._config
    layers = (True,) * (MODEL.num_layers - 1) + (False,)
    assert [_WINDOW, 0, 0] == [
        kv_window(config, model).num_tokens
        for model in (_WINDOWED, replace(_WINDOWED, sliding_layers=layers), replace(_WINDOWED, sliding_window=0))
    ]


def test_a_prompt_longer_than_the_pool_is_taken():
    """A prompt of 100 tokens is answered in a pool for 44; without a window it is refused."""
    (answer,) = _answers(1, num_prompt=100, max_tokens=3)
    _run(_make(), [answer])
    assert_equal(_unfreed(count=1, num_prompt=100, max_tokens=3), [answer])
    with pytest.raises(Exception, match="the KV cache holds 44"):
        make_engine(num_blocks=_NUM_BLOCKS, **_OPTIONS).submit(answer.request)  # type: ignore[arg-type]
