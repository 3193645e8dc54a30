"""Engines with a second tier: what the pool evicts is loaded again, and no answer is any different."""

import os
import threading
from collections.abc import Sequence

import pytest
import torch
from tests.unit.llm.engine_fixture import (
    Answer,
    answer_all,
    assert_as_alone,
    assert_clean,
    finish,
    make_engine,
    preempt,
    random_prompts,
    submit,
)

from weft.llm.block_store import FileStore, MemoryStore
from weft.llm.engine import Engine
from weft.llm.runner import ModelRunner

_BLOCK_SIZE, _NUM_NEW = 8, 24
#: 4 layers' halves of a token, with 2 heads of 8 numbers, float32.
_BLOCK_BYTES = _BLOCK_SIZE * 4 * 2 * 8 * 4
_PLENTY = 500 * _BLOCK_BYTES


def _make(num_bytes: int = _PLENTY, num_blocks: int = 20, **options: object) -> Engine:
    defaults = {"block_size": _BLOCK_SIZE, "max_num_seqs": 2, "watermark": 0.0}
    return make_engine(num_blocks=num_blocks, kv_offload_bytes=num_bytes, **defaults | options)  # type: ignore[arg-type]


def _runner(engine: Engine) -> ModelRunner:
    return engine._runner  # type: ignore[return-value]


def _answers(prompts: Sequence[Sequence[int]], **params: object) -> list[Answer]:
    options = {"max_tokens": _NUM_NEW, "logprobs": 1} | params
    return [Answer(prompt, **options) for prompt in prompts]  # type: ignore[arg-type]


@pytest.mark.parametrize("is_pinned_kind", [False, True])
def test_a_prompt_that_returns_is_loaded(is_pinned_kind: bool):
    """Six prompts that a pool for two holds in turn are found whole when they return, bitwise as computed alone."""
    prompts = random_prompts(6, 60, 60, seed=1)
    answers = _answers([*prompts, *prompts])
    engine = _make()
    if is_pinned_kind:  # the memory of a GPU's tier, on a CPU
        runner = _runner(engine)
        runner.close()
        runner._store = MemoryStore(500, _BLOCK_BYTES, is_pinned=False)
    answer_all(engine, answers)
    assert [0] * 6 + [56] * 6 == [answer.deltas[0].num_cached_tokens for answer in answers]
    tier = engine.pool.tier
    assert tier.num_saved >= tier.num_loaded >= 6 * 7 - 19
    assert (0, 0) == (tier.num_failed, tier.num_evicted)
    assert_as_alone(answers)


@pytest.mark.parametrize("num_bytes", [0, _BLOCK_BYTES, _PLENTY])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preempted_equals_undisturbed(num_bytes: int, temperature: float):
    """Where sequences take each other's blocks, answers are as alone, with a tier, with one of a block, and without."""
    answers = _answers(random_prompts(3, 20, 20, seed=4), max_tokens=76, temperature=temperature, seed=11)
    engine = preempt(answers, num_blocks=15, block_size=_BLOCK_SIZE, kv_offload_bytes=num_bytes)
    assert num_bytes // _BLOCK_BYTES == engine.pool.tier.num_slots
    if num_bytes == _PLENTY:
        assert engine.pool.tier.num_loaded > 0
        # What was computed again is less than a block for each preemption, and the token that samples.
        computed = engine.metrics.num_computed_tokens - sum(20 + 76 - 1 for _ in answers) - 1
        assert computed <= engine.num_preemptions * _BLOCK_SIZE
    assert_as_alone(answers)


def test_salts_hold_in_the_tier():
    """A tenant does not find another's prompt in the tier."""
    (prompt, *others) = random_prompts(4, 60, 60, seed=2)
    answers = _answers([prompt, *others, prompt, prompt])
    answers[0].request.salt = answers[-1].request.salt = b"tenant a"
    answers[-2].request.salt = b"tenant b"
    engine = _make()
    answer_all(engine, answers)
    assert [0, 56] == [answer.deltas[0].num_cached_tokens for answer in answers[-2:]]
    assert engine.pool.tier.num_loaded > 0


def test_a_full_tier_forgets_what_was_used_least_recently():
    """A tier for one prompt's blocks keeps the prompt that was evicted last."""
    prompts = random_prompts(3, 60, 60, seed=3)
    answers = _answers([*prompts, prompts[0], prompts[1]], max_tokens=1)
    engine = _make(8 * _BLOCK_BYTES, num_blocks=9, max_num_seqs=1)
    answer_all(engine, answers)
    assert engine.pool.tier.num_evicted > 0
    assert engine.pool.tier.num_used <= 8
    assert_as_alone(answers)


def _returning(engine: Engine, damage: object) -> list[Answer]:
    """Six prompts, and the same again after ``damage`` was called on the engine's thread."""
    prompts = random_prompts(6, 60, 60, seed=1)
    first, again = _answers(prompts), _answers(prompts)

    def go_on(delta: object) -> None:
        if all(answer.is_ended for answer in first) and not again[0].request.arrival_ns:
            damage()  # type: ignore[operator]
            submit(engine, again)

    for answer in first:
        answer._on_delta = go_on
        engine.submit(answer.request)
    finish(engine, [*first, *again])
    return [*first, *again]


def test_a_file_cut_off_from_outside_costs_a_computation():
    """Where the tier's file is truncated, loads fail, prompts are computed instead, and the tier goes on."""
    engine = _make()
    store: FileStore = _runner(engine)._store  # type: ignore[assignment]
    answers = _returning(engine, lambda: os.truncate(f"/proc/self/fd/{store._file.fileno()}", 0))
    tier = engine.pool.tier
    assert tier.num_failed > 0
    assert tier.num_slots == 500
    assert all(answer.error is None for answer in answers)
    assert min(answer.deltas[0].num_cached_tokens for answer in answers) == 0
    assert_as_alone(answers)


def test_a_full_disk_while_serving_costs_the_tier_alone(monkeypatch, caplog):
    """A write that fails switches the tier off with one line in the log, and every request is answered."""
    real = os.pwrite
    engine = _make()

    def fill() -> None:
        def full(*args: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)

    answers = _returning(engine, fill)
    monkeypatch.setattr(os, "pwrite", real)
    assert engine.pool.tier.num_slots == 0
    assert 1 == sum("cannot be used any more" in record.message for record in caplog.records)
    assert all(answer.error is None for answer in answers)
    assert_as_alone(answers)


def test_blocks_that_fail_to_load_are_not_shared():
    """Where every load of a plan fails, a cancelled request among them leaves nothing wrong in the prefix cache."""
    prompts = random_prompts(6, 60, 60, seed=1)
    first, dropped, again = _answers(prompts), _answers(prompts[:1]), _answers(prompts)
    engine = _make()
    runner = _runner(engine)
    store = runner._store
    assert store is not None
    real = store.run

    def run(kv: torch.Tensor, transfers: object) -> list[int]:
        if not (blocks := transfers.loads[:, 1].tolist()):  # type: ignore[attr-defined]
            return real(kv, transfers)  # type: ignore[arg-type]
        real(kv, transfers)  # type: ignore[arg-type]
        with torch.inference_mode():
            kv[blocks] = 7.0
        if dropped[0].request.arrival_ns and not dropped[0].request.is_cancelled:
            engine.cancel(dropped[0].request)
        return list(blocks)

    store.run = run  # type: ignore[method-assign]

    def go_on(delta: object) -> None:
        if all(answer.is_ended for answer in first) and not again[0].request.arrival_ns:
            submit(engine, [*dropped, *again])

    for answer in first:
        answer._on_delta = go_on
        engine.submit(answer.request)
    finish(engine, [*first, *again])
    assert engine.pool.tier.num_failed > 0
    assert_as_alone([*first, *again])


def test_an_engine_that_stops_during_a_load_ends_every_request():
    """A stop while blocks are being loaded ends with an error for that request, and closes the file."""
    prompts = random_prompts(6, 60, 60, seed=1)
    first, late = _answers(prompts), _answers(prompts[:1], max_tokens=150)
    engine = _make()
    store: FileStore = _runner(engine)._store  # type: ignore[assignment]
    real, is_loading, may_go_on = store.run, threading.Event(), threading.Event()

    def run(kv: torch.Tensor, transfers: object) -> list[int]:
        if len(transfers.loads):  # type: ignore[attr-defined]
            is_loading.set()
            may_go_on.wait(60)
        return real(kv, transfers)  # type: ignore[arg-type]

    store.run = run  # type: ignore[method-assign]
    submit(engine, first)
    engine.start()
    for answer in first:
        answer.wait()
    engine.submit(late[0].request)
    assert is_loading.wait(60)
    stopper = threading.Thread(target=engine.stop, args=(0.0,))
    stopper.start()
    may_go_on.set()
    stopper.join(60)
    assert not engine._thread.is_alive()
    assert late[0].wait().error is not None
    assert store._file.closed
    assert_clean(engine)


def test_an_engine_that_never_started_closes_its_file():
    """``stop`` of an engine without a thread closes the file too."""
    engine = _make()
    store: FileStore = _runner(engine)._store  # type: ignore[assignment]
    assert engine.stop(0.0)
    assert store._file.closed


def test_a_step_that_fails_after_its_loads_loses_its_own_requests():
    """Where a step with loads raises, its requests fail, and the same prompts are right when asked again."""
    has_failed = threading.Event()

    def fail_once(plan: object) -> None:
        if plan.transfers is not None and len(plan.transfers.loads) and not has_failed.is_set():  # type: ignore[attr-defined]
            has_failed.set()
            raise RuntimeError("broken")

    engine = _make(before_step=fail_once)
    answers = _returning(engine, lambda: None)
    failed = [answer for answer in answers if answer.error is not None]
    assert 1 <= len(failed) <= 2
    assert_as_alone([answer for answer in answers if answer.error is None])
