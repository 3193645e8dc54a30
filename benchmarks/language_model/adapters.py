"""LoRA adapters: CPU time of a decode step with eight in the batch, with a bank that nobody uses, and without one.

A Llama of 134 million parameters in float32, 32 sequences of 64 tokens, ranks of 16 in all linear layers; the ways take
turns. ``--shape`` does not count.
"""

import time

import torch

from benchmarks.language_model.figures import Figure, Target, figure
from benchmarks.language_model.shapes import Model
from benchmarks.language_model.sizes import Sizes
from weft.llm.models.llama import Llama
from weft.llm.models.lora import LoraBank
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights

_CASE = "lora"
_ROWS, _CONTEXT, _BLOCK, _RANK, _ADAPTERS = 32, 64, 8, 16, 8
_STEPS = 8


def _config() -> TransformerConfig:
    return Llama(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=12,
        head_dim=64, max_position_embeddings=2048,
    )  # fmt: skip


def _step_ms(model: TransformerModel, adapters: torch.Tensor | None) -> float:
    """CPU time of a step in which each sequence gets one token, in milliseconds."""
    per_sequence = _CONTEXT // _BLOCK
    tables = torch.arange(1, 1 + _ROWS * per_sequence, dtype=torch.int32).view(_ROWS, per_sequence)
    kv = model.new_kv(1 + _ROWS * per_sequence, _BLOCK)
    ends = torch.full((_ROWS,), _CONTEXT, dtype=torch.int32)
    places = tables[:, -1].long() * _BLOCK + _BLOCK - 1
    starts = torch.arange(_ROWS + 1, dtype=torch.int32)
    start_ns = 0
    for step in range(_STEPS + 1):
        if step == 1:
            start_ns = time.thread_time_ns()
        hidden = model.forward(starts[:-1], ends - 1, kv, tables, starts, ends, places, 1, _CONTEXT, adapters)
        model.logits(hidden)
    return (time.thread_time_ns() - start_ns) / _STEPS / 1e6


def measure(model: Model, sizes: Sizes) -> list[Figure]:
    """Milliseconds and ratios, a pair of turns each."""
    del model
    config = _config()
    weights = random_weights(config, 0)
    bank = LoraBank(config, _ADAPTERS, _RANK, torch.float32, "cpu")
    plain, own = TransformerModel(config, dict(weights)), TransformerModel(config, dict(weights), lora=bank)
    for linear in bank.linears.values():
        linear.a.normal_(std=0.01)
        linear.b.normal_(std=0.01)
    ways = {
        "without": (plain, None),
        "unused": (own, None),
        "one": (own, torch.zeros(_ROWS, dtype=torch.int32)),
        "eight": (own, torch.arange(_ROWS, dtype=torch.int32) % _ADAPTERS),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(2 * sizes.num_rounds):
        for name, way in ways.items():
            times[name].append(_step_ms(*way))
    ratios = {name: [a / b for a, b in zip(times[name], times["without"], strict=True)] for name in ways}
    return [
        figure(_CASE, f"step of {_ROWS} rows, without adapters", times["without"], "ms"),
        figure(
            _CASE, "  slots for adapters that no row uses, over that", ratios["unused"], "x", target=Target("<=", 1.02)
        ),
        figure(_CASE, "  one adapter, over that", ratios["one"], "x"),
        figure(
            _CASE, f"  {_ADAPTERS} adapters of rank {_RANK}, over that", ratios["eight"], "x", target=Target("<=", 1.25)
        ),
    ]
