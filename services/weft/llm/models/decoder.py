"""The decoder layer over a paged KV cache: Llama's, with hooks for other architectures.

Imports no torch, because configurations, which make layers, are also read without it.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from weft.llm import ops
from weft.llm.models.mlp import Experts, Mlp, Routing

if TYPE_CHECKING:
    from torch import Tensor

    from weft.llm.parallel.context import ContextShare
    from weft.llm.parallel.groups import Group
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
        ropes: Cosines and sines by position of each rotary embedding, float32 ``[max_positions, head_dim / 2]``.
        share: Of a step that ranks divide, by whose tokens and pieces the others are; None: it is whole.
        caches: By rotary embedding, results that operations of its first layer share with those of later layers.
    """

    positions: "Tensor"
    slot_mapping: "Tensor"
    block_tables: "Tensor"
    q_start: "Tensor"
    ctx_len: "Tensor"
    max_q_len: int
    max_ctx_len: int
    ropes: "Sequence[tuple[Tensor, Tensor]]"
    share: "ContextShare | None" = None
    caches: defaultdict[int, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))


class LayerSettings(NamedTuple):
    """Numbers of one layer: the prefix of its weights' names, heads and their width, ``eps`` of norms.

    Attributes:
        scale: Factor on the scores of attention.
        window: Tokens that a token attends to, itself included; 0: all.
        soft_cap: Scores of attention become ``soft_cap * tanh(score / soft_cap)``; 0: they stay.
        residual_scale: Factor on what attention and MLP add to the residual stream.
        rotary_dim: Numbers at the front of a head that positions rotate; 0: all.
        rope: Index of its rotary embedding in ``StepInput.ropes``.
        deterministic: Use operations whose rows do not depend on other rows.
        routing: How layers with experts choose them.
        tensor: Ranks that have the layer's other heads and experts; None: this one has all.
    """

    prefix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    residual_scale: float = 1.0
    rotary_dim: int = 0
    rope: int = 0
    deterministic: bool = False
    routing: Routing | None = None
    tensor: "Group | None" = None


class DecoderLayer:
    """Pre-norm decoder layer: attention and MLP, each added to the residual stream.

    Args:
        weights: Weights of the whole model, by the names of ``TransformerConfig.weight_parts``. Not copied.
        linear: Products with its matrices, by the same names; their biases are worked in.
    """

    #: Names of the norms of attention and MLP.
    attention_norm: ClassVar[str] = "input_layernorm"
    mlp_norm: ClassVar[str] = "post_attention_layernorm"

    def __init__(
        self, settings: LayerSettings, weights: "Mapping[str, Tensor]", linear: Mapping[str, ops.Linear]
    ) -> None:
        attention, mlp = settings.prefix + "self_attn.", settings.prefix + "mlp."
        self._settings = settings
        self._eps = settings.eps
        self._head_counts = (settings.num_heads, settings.num_kv_heads, settings.num_kv_heads)
        self._num_all_heads = sum(self._head_counts)
        self._attention_norm = weights[f"{settings.prefix}{self.attention_norm}.weight"]
        self._qkv = linear[attention + "qkv_proj.weight"]
        self._q_norm = weights.get(attention + "q_norm.weight")
        self._k_norm = weights.get(attention + "k_norm.weight")
        sinks = weights.get(attention + "sinks")
        self._sinks = None if sinks is None else sinks.float()
        self._output = linear[attention + "o_proj.weight"]
        self._mlp_norm = weights[f"{settings.prefix}{self.mlp_norm}.weight"]
        self._mlp = self.mlp(mlp, linear)
        order = _rotary_order(settings)
        self._rotary_order = self._attention_norm.long().new_tensor(order) if order else None

    def forward(
        self, hidden: "Tensor", residual: "Tensor | None", step: StepInput, kv_layer: "KVLayer"
    ) -> "tuple[Tensor, Tensor]":
        """Run the layer on the tokens of a step, and store their keys and values.

        Args:
            hidden: Output of the previous layer, not yet added to the residual stream, ``[T, hidden_size]``.
            residual: The residual stream without it; None before the first layer.

        Returns:
            The output of this layer's MLP, and the residual stream without it.
        """
        x, residual = ops.rms_norm(hidden, self._attention_norm, self._eps, residual)
        x = self.attend(x, step, kv_layer)
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, residual)
        return self.feed_forward(x), residual

    def _scaled(self, x: "Tensor") -> "Tensor":
        scale = self._settings.residual_scale
        return x if scale == 1.0 else x.mul_(scale)

    def feed_forward(self, x: "Tensor") -> "Tensor":
        """The MLP of normed rows ``[T, hidden_size]``."""
        return self._scaled(self._mlp(x))

    def mlp(self, prefix: str, linear: Mapping[str, ops.Linear]) -> Mlp | Experts:
        """The MLP with matrices whose names begin with ``prefix``; experts where there are some."""
        if (routing := self._settings.routing) is None or prefix + "gate_up_proj.weight" in linear:
            return Mlp(prefix, linear, self.activate)
        settings = self._settings
        return Experts(prefix, linear, self.activate, routing, settings.tensor, deterministic=settings.deterministic)

    def activate(self, gate_up: "Tensor") -> "Tensor":
        """Input of the last product of the MLP, from gates and ups side by side, ``[T, 2 * intermediate_size]``."""
        return ops.silu_mul(gate_up)

    def attend(self, x: "Tensor", step: StepInput, kv_layer: "KVLayer") -> "Tensor":
        """Attention of normed rows ``[T, hidden_size]`` and its output projection; stores keys and values."""
        settings, num_tokens = self._settings, x.shape[0]
        heads = self._qkv(x).view(num_tokens, self._num_all_heads, settings.head_dim)
        q, k, v = heads.split(self._head_counts, dim=1)
        if self._q_norm is not None and self._k_norm is not None:
            q, k = self._normed(q, self._q_norm), self._normed(k, self._k_norm)
        if self._rotary_order is not None:
            q, k = q.index_select(2, self._rotary_order), k.index_select(2, self._rotary_order)
        cache, (cos, sin) = step.caches[settings.rope], step.ropes[settings.rope]
        ops.rope_and_store(q, k, v, cos, sin, step.positions, step.slot_mapping, kv_layer, step_cache=cache)
        if step.share is not None:
            step.share.exchange(kv_layer)
        out = ops.paged_attention(
            q,
            kv_layer,
            step.block_tables,
            step.q_start,
            step.ctx_len,
            scale=settings.scale,
            window=settings.window,
            soft_cap=settings.soft_cap,
            sinks=self._sinks,
            max_q_len=step.max_q_len,
            max_ctx_len=step.max_ctx_len,
            deterministic=settings.deterministic,
            step_cache=cache,
        )
        return self._scaled(self._output(out.reshape(num_tokens, settings.num_heads * settings.head_dim)))

    def _normed(self, heads: "Tensor", weight: "Tensor") -> "Tensor":
        """Norm of each head, or of all heads of a token together if the weight is as wide."""
        rows, _ = ops.rms_norm(heads.reshape(-1, weight.shape[0]), weight, self._eps)
        return rows.view(heads.shape)


def _rotary_order(settings: LayerSettings) -> list[int]:
    """An order of a head's numbers in which the rotated pairs are where those of a whole head are; empty: as it is.

    A score of attention does not depend on the order of the numbers in queries and keys.
    """
    if not settings.rotary_dim:
        return []
    half, rest = settings.rotary_dim // 2, (settings.head_dim - settings.rotary_dim) // 2
    pairs = (
        range(half),
        range(2 * half, 2 * half + rest),
        range(half, 2 * half),
        range(2 * half + rest, settings.head_dim),
    )
    return [place for each in pairs for place in each]
