"""The decoder layer of Llama-like models over a paged KV cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.llm import ops
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weight_parts import layer_prefix
from weft_kernels.blocks.layout import KVLayer


@dataclass(frozen=True, slots=True)
class StepInput:
    """Inputs of a step that all layers share; T tokens of B sequences.

    Attributes:
        positions: Position of each token in its sequence, int32 ``[T]``.
        slot_mapping: Slot in the KV cache for each token, block times block size plus offset, int64 ``[T]``.
        block_tables: Blocks of each sequence in order, int32 ``[B, M]``.
        q_start: First token of each sequence, and T, int32 ``[B + 1]``.
        ctx_len: Tokens of each sequence after the step, int32 ``[B]``.
        max_q_len: Most tokens of one sequence in the step.
        max_ctx_len: Largest ``ctx_len``.
        cos: Cosines of the rotary embedding by position, float32 ``[max_positions, head_dim / 2]``.
        sin: Sines, of the same shape.
        cache: Results that operations of the first layer share with those of later layers.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    q_start: torch.Tensor
    ctx_len: torch.Tensor
    max_q_len: int
    max_ctx_len: int
    cos: torch.Tensor
    sin: torch.Tensor
    cache: dict[str, Any] = field(default_factory=dict)


class DecoderLayer:
    """Pre-norm decoder layer: attention and MLP, each added to the residual stream.

    Args:
        config: The model.
        index: Index of the layer.
        weights: Weights of the whole model, by the names of ``weight_parts``. Not copied.
        linear: Products with its matrices, by the same names; their biases are worked in.
        deterministic: Use operations whose rows do not depend on other rows.
    """

    def __init__(
        self,
        config: TransformerConfig,
        index: int,
        weights: Mapping[str, torch.Tensor],
        linear: Mapping[str, ops.Linear],
        *,
        deterministic: bool,
    ) -> None:
        prefix = layer_prefix(index)
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        self._eps = config.rms_norm_eps
        self._num_heads = config.num_heads
        self._head_dim = config.head_dim
        self._head_counts = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._num_all_heads = sum(self._head_counts)
        self._scale = config.head_dim**-0.5
        self._window = config.windows[index]
        self._deterministic = deterministic
        self._input_norm = weights[prefix + "input_layernorm.weight"]
        self._qkv = linear[attention + "qkv_proj.weight"]
        self._q_norm = weights.get(attention + "q_norm.weight")
        self._k_norm = weights.get(attention + "k_norm.weight")
        self._output = linear[attention + "o_proj.weight"]
        self._mlp_norm = weights[prefix + "post_attention_layernorm.weight"]
        self._gate_up = linear[mlp + "gate_up_proj.weight"]
        self._down = linear[mlp + "down_proj.weight"]

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, step: StepInput, kv_layer: KVLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layer on the tokens of a step, and store their keys and values.

        Args:
            hidden: Output of the previous layer, not yet added to the residual stream, ``[T, hidden_size]``.
            residual: The residual stream without it; None before the first layer.
            step: The tokens.
            kv_layer: This layer's part of the KV cache.

        Returns:
            The output of this layer's MLP, and the residual stream without it.
        """
        x, residual = ops.rms_norm(hidden, self._input_norm, self._eps, residual)
        x = self._output(self._attention(x, step, kv_layer))
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, residual)
        return self._down(ops.silu_mul(self._gate_up(x))), residual

    def _attention(self, x: torch.Tensor, step: StepInput, kv_layer: KVLayer) -> torch.Tensor:
        num_tokens = x.shape[0]
        heads = self._qkv(x).view(num_tokens, self._num_all_heads, self._head_dim)
        q, k, v = heads.split(self._head_counts, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._normed(q, self._q_norm), self._normed(k, self._k_norm)
        ops.rope_and_store(
            q, k, v, step.cos, step.sin, step.positions, step.slot_mapping, kv_layer, step_cache=step.cache
        )
        out = ops.paged_attention(
            q,
            kv_layer,
            step.block_tables,
            step.q_start,
            step.ctx_len,
            scale=self._scale,
            window=self._window,
            max_q_len=step.max_q_len,
            max_ctx_len=step.max_ctx_len,
            deterministic=self._deterministic,
            step_cache=step.cache,
        )
        return out.reshape(num_tokens, self._num_heads * self._head_dim)

    def _normed(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, _ = ops.rms_norm(heads.reshape(-1, self._head_dim), weight, self._eps)
        return rows.view(heads.shape)
