"""The loss table: lines for every kind, and errors of weights within what normal weights have."""

from pathlib import Path

import torch
from benchmarks.language_model.losses import measure, render
from tests.unit.llm.quantized_folders import CONFIG, gptq, save_folder

torch.set_num_threads(1)


def test_lines_of_the_table(tmp_path: Path) -> None:
    """Each kind is beside float32; errors of normal weights are within their bounds, and 4 bits have more than 8."""
    save_folder(tmp_path / "model", gptq(), None, is_plain=lambda module: True)
    losses = measure(tmp_path / "model", [torch.arange(50) * 7 % CONFIG.vocab_size])
    assert ["float32", "int8", "int4", "int4", "nf4", "KV"] == [loss.kind.split(",")[0].split()[0] for loss in losses]
    errors = {loss.kind: loss.weight_error for loss in losses if loss.weight_error is not None}
    assert all(loss.weight_error <= loss.weight_error_bound for loss in losses if loss.weight_error_bound)
    assert errors["int8, scale by output"] < 0.2 * errors["int4, groups of 32"]
    assert all(0 <= loss.agreement <= 1 and loss.perplexity > 1 for loss in losses)
    assert 1.0 == losses[0].agreement
    assert "int4, groups of 32" in render(losses)
