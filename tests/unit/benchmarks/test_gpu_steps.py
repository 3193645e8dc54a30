"""The measurement of steps on a GPU: without one it says so; its plans and figures are tried on a CPU."""

from dataclasses import replace

import pytest
import torch
from benchmarks.language_model import gpu_steps


def test_every_figure_is_made_on_a_tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decodes, prompts, fewer bits: one line each, so that the program runs where there is a GPU."""
    monkeypatch.setattr(gpu_steps, "_STEPS", 1)
    monkeypatch.setattr(gpu_steps, "_ROUNDS", 1)
    model = replace(
        gpu_steps.LLAMA_8B, vocab_size=96, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, dtype="float32",
    )  # fmt: skip
    bench = gpu_steps.Bench(model, "cpu", 1e9, 1e9)
    assert 2 == len(list(gpu_steps.decode_figures(bench, ((1, 20), (3, 40)))))
    assert 1 == len(list(gpu_steps.prompt_figures(bench, ((2, 24),))))
    assert ["bf16", "W8", "W4", "KV"] == [line.split()[1] for line in gpu_steps.lowbit_figures(bench, ((2, 20),))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, and what to do."""
    assert 2 == gpu_steps.main([])
    assert "sees no CUDA device" in capsys.readouterr().err
