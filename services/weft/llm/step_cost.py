"""Minimum arithmetic and memory traffic of a step, from the model's shape and the plan."""

import numpy as np

from weft.llm.models.model_config import DTYPE_BYTES, TransformerConfig
from weft.llm.scheduler.plan import ForwardPlan


class StepCost:
    """Counts floating-point operations and bytes of steps, for MFU and MBU.

    A multiply-add counts as two operations. Weights are read once per step, keys and values of every sequence once;
    norms, rotary embedding and sampling are not counted.

    Args:
        model: The model's shape.
        dtype: Type of weights, a key of ``DTYPE_BYTES``.
        kv_dtype: Type of the KV cache, as of ``kv_bytes_per_token``.
        weight_bytes: Of all matrices of products as they are in memory; None: as numbers of ``dtype``.
    """

    def __init__(self, model: TransformerConfig, dtype: str, kv_dtype: str, weight_bytes: int | None = None) -> None:
        width = model.num_heads * model.head_dim
        num_layer_weights = 2 * model.hidden_size * (width + model.num_kv_heads * model.head_dim)
        num_layer_weights += 3 * model.hidden_size * model.intermediate_size
        num_head_weights = model.hidden_size * model.vocab_size
        self._flops_per_token = 2 * model.num_layers * num_layer_weights
        self._flops_per_sample = 2 * num_head_weights
        self._flops_per_seen_token = 4 * model.num_layers * width
        num_weights = model.num_layers * num_layer_weights + num_head_weights
        self._weight_bytes = num_weights * DTYPE_BYTES[dtype] if weight_bytes is None else weight_bytes
        self._kv_bytes_per_token = model.kv_bytes_per_token(kv_dtype)

    def of(self, plan: ForwardPlan) -> tuple[int, int]:
        """Floating-point operations and bytes of one step."""
        num_new, context = np.diff(plan.q_start).astype(np.int64), plan.ctx_len.astype(np.int64)
        num_seen = int((num_new * context - num_new * (num_new - 1) // 2).sum())
        num_flops = len(plan.token_ids) * self._flops_per_token + len(plan.sample_rows) * self._flops_per_sample
        num_bytes = self._weight_bytes + int(context.sum()) * self._kv_bytes_per_token
        return num_flops + num_seen * self._flops_per_seen_token, num_bytes
