"""The measurement of steps on a GPU: without one it says so; its plans are those of the scheduler."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.language_model import gpu_steps


def test_a_plan_has_every_token_in_a_block_of_its_own_sequence() -> None:
    """Positions end with the context, cache slots follow from the tables, and no block is shared or the null block."""
    plan = gpu_steps.step_plan(3, 5, 40)
    assert [40, 40, 40] == plan.ctx_len.tolist()
    assert [*range(35, 40)] * 3 == plan.positions.tolist()
    tables = {(slot, index): block for slot, index, block in plan.table_delta.tolist()}
    assert set(range(1, 10)) == set(tables.values())
    rows = zip(np.repeat(plan.slots, 5).tolist(), plan.positions.tolist(), strict=True)
    assert [tables[slot, at // 16] * 16 + at % 16 for slot, at in rows] == plan.slot_mapping.tolist()
    assert [4, 9, 14] == plan.sample_rows.tolist()


def test_every_figure_is_made_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, prompts, fewer bits: one line each, so that the program runs where there is a GPU."""
    monkeypatch.setattr(gpu_steps, "_STEPS", 1)
    monkeypatch.setattr(gpu_steps, "_ROUNDS", 1)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
    }
    model = replace(gpu_steps.LLAMA_8B, vocab_size=128, num_layers=1, dtype="float32", **sizes)
    bench = gpu_steps.Bench(model, "cpu", 1e9, 1e9)
    assert 2 == len(list(gpu_steps.decode_figures(bench, ((1, 20), (3, 40)))))
    assert 1 == len(list(gpu_steps.prompt_figures(bench, ((2, 24),))))
    assert ["bf16", "W8", "W4", "KV"] == [line.split()[1] for line in gpu_steps.lowbit_figures(bench, ((2, 20),))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and what to do."""
    assert 2 == gpu_steps.main([])
    assert "sees no CUDA device" in capsys.readouterr().err
