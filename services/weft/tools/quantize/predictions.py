"""How well a model predicts rows of text."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from weft.llm.models.model import TransformerModel
from weft.tools.quantize.sequence_input import BLOCK_SIZE, sequence_input

_MAX_LOSS = 700.0  # nats; its exponential is a number yet


class Predictions(NamedTuple):
    """Of a model on rows of text.

    Attributes:
        perplexity: Exponential of the mean negative log probability of each token but the first of a row.
        greedy: The likeliest next token at every position but the last of a row, all rows one after another.
    """

    perplexity: float
    greedy: torch.Tensor

    def agreement(self, other: "Predictions") -> float:
        """Share of positions where both models hold the same token likeliest, 0 to 1."""
        return float((self.greedy == other.greedy).double().mean())


def evaluate(model: TransformerModel, rows: Sequence[torch.Tensor], kv_dtype: torch.dtype | None = None) -> Predictions:
    """Predict each token of each row from those before it.

    Args:
        model: On a CPU.
        rows: Token ids, int64, of two tokens at least.
        kv_dtype: Type of the KV cache; None: that of computation.
    """
    total, greedy = 0.0, []
    for row in rows:
        count = len(row)
        step = sequence_input(count)
        dtype = kv_dtype or model.dtype
        cache = model.new_kv(step.num_blocks, BLOCK_SIZE, dtype)
        hidden = model.forward(
            row, step.positions, cache, step.block_tables, step.q_start, step.ctx_len, step.slot_mapping, count, count
        )
        logits = model.logits(hidden[:-1])
        total += float(torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum"))
        greedy.append(logits.argmax(1))
    tokens = torch.cat(greedy)
    return Predictions(math.exp(min(total / len(tokens), _MAX_LOSS)), tokens)
