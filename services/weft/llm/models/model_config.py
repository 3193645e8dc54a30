"""``TransformerConfig``, the base of all architectures: everything about a model but its weights.

Imports no torch, because capacity planning reads configurations without it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer, LayerSettings
from weft.llm.models.fields import DTYPE_BYTES, Fields, count, fault, flag, is_above_zero, stored_dtype, token_ids
from weft.llm.models.mlp import Routing
from weft.llm.models.rope import ROPE_FIELDS, check_rotation, checked_rope, rope_of_config, rotary_dim_of
from weft.llm.weights.gguf import GgufLayout
from weft.llm.weights.parts import (
    EMBEDDING,
    FINAL_NORM,
    LM_HEAD,
    Part,
    fused_shape,
    is_matrix,
    is_of_experts,
    layer_prefix,
)

if TYPE_CHECKING:
    from torch import Tensor

    from weft.llm.parallel.groups import Group


#: Types of 8-bit codes of a KV cache, which have a float32 scale for each token and head.
KV_CODES = ("int8", "fp8")
_KV_SCALE_BYTES = 4
#: Most layers and positions: tables grow with them, and a file may claim any number.
_MAX_LAYERS, _MAX_CONTEXT_LEN = 4096, 2**24
_POSITIVE = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class TransformerConfig:
    """A decoder-only transformer: sizes, names of weights, layers, and costs of a step.

    Each architecture of ``registry`` is a subclass that overrides what differs from Llama.

    Attributes:
        num_kv_heads: Key and value heads; divides ``num_heads``.
        head_dim: Width of a head, even. Need not be ``hidden_size / num_heads``.
        rope: Rotary embedding as in ``rope_parameters`` of transformers: ``rope_type`` (``default``, ``linear``,
            ``dynamic``, ``yarn``, ``llama3``, ``longrope``), ``rope_theta`` and the parameters of the type.
        rms_norm_eps: Added to the mean square in every norm.
        max_position_embeddings: Context length in training, in tokens.
        tie_word_embeddings: The LM head shares the embedding's weight.
        has_qk_norm: Queries and keys are normed per head before the rotary embedding.
        sliding_window: Tokens that a token attends to, including itself, in ``sliding_layers``. 0: all.
        sliding_layers: Whether each layer uses the window. Empty: all layers do, if there is one.
        eos_token_ids: End-of-text tokens, without those outside the vocabulary.
        dtype: Type of the published weights: ``float32``, ``float16`` or ``bfloat16``.

    Raises:
        InvalidArgumentError: A value is missing, not of its type, out of range or not supported.
    """

    #: Name of its class in transformers, as ``architectures`` of ``config.json`` has it.
    architecture: ClassVar[str] = ""
    #: Values of transformers for absent fields of ``config.json``; null counts as absent unless it is ``nullable``.
    defaults: ClassVar[Mapping[str, Any]] = {}
    nullable: ClassVar[tuple[str, ...]] = ()
    #: Field of the activation, and its allowed values.
    activation: ClassVar[tuple[str, tuple[str, ...]]] = ("hidden_act", ("silu", "swish"))
    #: Its GGUF files.
    gguf: ClassVar[GgufLayout] = GgufLayout()
    #: The class of its layers.
    layer_class: ClassVar[type[DecoderLayer]] = DecoderLayer
    #: The gain of a norm is its weight and this.
    norm_offset: ClassVar[float] = 0.0
    #: Fields of ``config.json`` that change nothing in this architecture, though they do in others.
    ignored: ClassVar[tuple[str, ...]] = ()
    #: A part of each head may be rotated, the rest not.
    has_partial_rotation: ClassVar[bool] = False
    #: The draft head that its checkpoints have (MTP), a ``HeadConfig``; None: none that is supported.
    mtp_head: ClassVar[Any] = None
    #: Each head has a learnt score without a value in the softmax of attention.
    has_sinks: ClassVar[bool] = False
    #: Its own fields that are numbers above 0; they have these names in ``config.json`` too.
    factors: ClassVar[tuple[str, ...]] = ()

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: dict[str, Any] = field(default_factory=dict)
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    has_output_bias: bool = False
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if type(value) is not int or value <= 0:
                raise fault(name, "a whole number above 0", value)
        if type(self.rms_norm_eps) is not float or not 0 < self.rms_norm_eps < 1:
            raise fault("rms_norm_eps", "a number above 0 and below 1", self.rms_norm_eps)
        if self.num_heads % self.num_kv_heads:
            raise fault("num_kv_heads", f"a divisor of num_heads = {self.num_heads}", self.num_kv_heads)
        if self.head_dim % 2:
            raise fault("head_dim", "even, because positions rotate pairs of numbers", self.head_dim)
        if type(self.sliding_window) is not int or self.sliding_window < 0:
            raise fault("sliding_window", "a whole number of tokens, 0 for none", self.sliding_window)
        if len(self.sliding_layers) not in (0, self.num_layers):
            raise fault("sliding_layers", f"one for each of {self.num_layers} layers, or none", self.sliding_layers)
        if self.dtype not in DTYPE_BYTES:
            raise fault("dtype", f"one of {', '.join(DTYPE_BYTES)}", self.dtype)
        object.__setattr__(self, "rope", checked_rope(self.rope))
        check_rotation(self.rope, self.head_dim, may_be_partial=self.has_partial_rotation)
        if self.max_context_len > _MAX_CONTEXT_LEN:
            allowed = f"at most {_MAX_CONTEXT_LEN}, extension by rope_parameters included"
            raise fault("max_position_embeddings", allowed, self.max_context_len)
        for name in self.factors:
            if not is_above_zero(value := getattr(self, name)):
                raise fault(name, "a number above 0", value)

    @classmethod
    def from_json(cls, config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> Self:
        """Convert a parsed ``config.json`` of this architecture and, optionally, a parsed ``generation_config.json``.

        Raises:
            InvalidArgumentError: The model is not supported; the message names the field.
        """
        given = {name: value for name, value in config.items() if value is not None or name in cls.nullable}
        ends = (generation or {}).get("eos_token_id")
        values = Fields({**cls.defaults, **given, **({} if ends is None else {"eos_token_id": ends})})
        made = cls(**cls.fields_of(values))
        values.check_unread(given, cls.architecture, {*cls.ignored, *ROPE_FIELDS})
        return made

    @classmethod
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Fields of this class from a ``config.json`` with ``defaults`` filled in; subclasses change and add some."""
        name, activations = cls.activation
        if values.get(name, activations[0]) not in activations:
            raise fault(name, f"one of {', '.join(activations)}", values.get(name))
        if values.get("mlp_bias"):
            raise fault("mlp_bias", "false: feed-forward layers with a bias are not supported", True)
        num_layers, num_heads = count(values, "num_hidden_layers"), count(values, "num_attention_heads")
        if num_layers > _MAX_LAYERS:
            raise fault("num_hidden_layers", f"at most {_MAX_LAYERS}", num_layers)
        hidden_size, vocab_size = count(values, "hidden_size"), count(values, "vocab_size")
        has_bias = flag(values, "attention_bias")
        eos = token_ids("eos_token_id", values.get("eos_token_id"))
        return {
            "vocab_size": vocab_size,
            "hidden_size": hidden_size,
            "intermediate_size": count(values, "intermediate_size"),
            "num_layers": num_layers,
            "num_heads": num_heads,
            "num_kv_heads": count(values, "num_key_value_heads", num_heads),
            "head_dim": count(values, "head_dim", hidden_size // num_heads),
            "rope": cls.rope_of(values),
            "rms_norm_eps": values.get("rms_norm_eps", 1e-6),
            "max_position_embeddings": count(values, "max_position_embeddings"),
            "tie_word_embeddings": flag(values, "tie_word_embeddings"),
            "has_qkv_bias": has_bias,
            "has_output_bias": has_bias,
            "eos_token_ids": tuple(token for token in eos if token < vocab_size),
            "bos_token_id": next(iter(token_ids("bos_token_id", values.get("bos_token_id"))), None),
            "dtype": stored_dtype(values),
            **{name: values[name] for name in cls.factors},
        }

    @classmethod
    def rope_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The field ``rope``."""
        return rope_of_config(values)

    @property
    def name(self) -> str:
        """Name of its class in transformers."""
        return self.architecture

    @property
    def windows(self) -> tuple[int, ...]:
        """Attention window of each layer, in tokens; 0: full attention."""
        is_sliding = self.sliding_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if slides else 0 for slides in is_sliding)

    @property
    def num_kv_layers(self) -> int:
        """Layers that have keys and values of their own in the KV cache."""
        return self.num_layers

    @property
    def ropes(self) -> tuple[dict[str, Any], ...]:
        """Rotary embeddings of the layers; ``rope_index`` says which layer has which."""
        return (self.rope,)

    def rope_index(self, index: int) -> int:
        """Index in ``ropes`` of the rotary embedding of layer ``index``."""
        del index
        return 0

    @property
    def attention_scale(self) -> float:
        """Factor on the scores of attention."""
        return float(self.head_dim**-0.5)

    @property
    def embedding_scale(self) -> float:
        """Factor on the embeddings of tokens."""
        return 1.0

    @property
    def soft_cap(self) -> float:
        """Soft cap of the scores of attention; 0: none."""
        return 0.0

    @property
    def residual_scale(self) -> float:
        """Factor on what attention and MLP add to the residual stream."""
        return 1.0

    @property
    def routing(self) -> Routing | None:
        """How layers with experts choose them; None: no layer has any."""
        return None

    def num_experts_of(self, name: str) -> int:
        """Number of matrices that lie one after another in the weight ``name``."""
        del name
        return 1

    @property
    def divided(self) -> dict[str, int]:
        """Counts that tensor ranks divide evenly, by their names in ``config.json``; see ``of_rank``."""
        return {
            "num_attention_heads": self.num_heads,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
        }

    def of_rank(self, size: int) -> Self:
        """What each of ``size`` tensor ranks has of the model; where they have fewer, they share a head of keys."""
        if size == 1:
            return self
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(self.num_kv_heads // size, 1),
            intermediate_size=max(self.intermediate_size // size, 1),
            vocab_size=-(-self.vocab_size // size),
        )

    def expert_share(self, num_tokens: float) -> float:
        """Share of the experts of a layer that so many tokens choose together, if they choose at random."""
        del num_tokens
        return 1.0

    @property
    def mlp_width(self) -> int:
        """Numbers of a token between the products of an MLP."""
        return self.intermediate_size

    def final_logits(self, logits: "Tensor") -> "Tensor":
        """The model's logits from the products of the LM head, float32, which may be overwritten."""
        return logits

    @property
    def max_context_len(self) -> int:
        """Context length in tokens: as trained, or as extended by the type of rotary embedding.

        Type ``dynamic`` rescales as the context grows, which would invalidate stored keys; it is limited to the trained
        length, where it has no effect.
        """
        trained, rope = self.max_position_embeddings, self.rope
        if rope["rope_type"] == "linear":
            return max(trained, int(trained * rope["factor"]))
        if rope["rope_type"] == "yarn":
            return max(trained, int(rope["original_max_position_embeddings"] * rope["factor"]))
        return trained

    def layer(
        self,
        index: int,
        weights: "Mapping[str, Tensor]",
        linear: Mapping[str, ops.Linear],
        *,
        deterministic: bool,
        tensor: "Group | None" = None,
    ) -> DecoderLayer:
        """Create layer ``index`` from weights and products, by the names of ``weight_parts``; norms as of ``gain``.

        ``tensor``: As of ``LayerSettings``.
        """
        settings = LayerSettings(
            layer_prefix(index),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.rms_norm_eps,
            self.attention_scale,
            self.windows[index],
            self.soft_cap,
            self.residual_scale,
            rotary_dim_of(self.ropes[self.rope_index(index)], self.head_dim),
            self.rope_index(index),
            deterministic,
            self.routing,
            tensor,
        )
        return self.layer_class(settings, weights, linear)

    def weight_parts(self) -> dict[str, list[Part]]:
        """Every weight of the model by name, with the checkpoint tensors that it is fused from."""
        width, vocabulary = self.hidden_size, self.vocab_size
        parts = {EMBEDDING: [Part(EMBEDDING, (vocabulary, width))]}
        for index in range(self.num_layers):
            parts.update(self.layer_parts(layer_prefix(index)))
        parts[FINAL_NORM] = [Part(FINAL_NORM, (width,))]
        if not self.tie_word_embeddings:
            parts[LM_HEAD] = [Part(LM_HEAD, (vocabulary, width))]
        return parts

    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        """Weights of a layer, whose names begin with ``prefix``."""
        width, inner = self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        projections = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
        parts = {
            attention + "qkv_proj.weight": [
                Part(f"{attention}{name}.weight", (rows, width)) for name, rows in projections.items()
            ],
            mlp + "gate_up_proj.weight": [
                Part(f"{mlp}{name}.weight", (inner, width)) for name in ("gate_proj", "up_proj")
            ],
        }
        if self.has_qkv_bias:
            parts[attention + "qkv_proj.bias"] = [
                Part(f"{attention}{name}.bias", (rows,)) for name, rows in projections.items()
            ]
        whole: dict[str, tuple[int, ...]] = {
            prefix + "input_layernorm.weight": (width,),
            attention + "o_proj.weight": (width, q_width),
            prefix + "post_attention_layernorm.weight": (width,),
            mlp + "down_proj.weight": (width, inner),
        }
        if self.has_qk_norm:
            whole[attention + "q_norm.weight"] = whole[attention + "k_norm.weight"] = (self.head_dim,)
        if self.has_sinks:
            whole[attention + "sinks"] = (self.num_heads,)
        if self.has_output_bias:
            whole[attention + "o_proj.bias"] = (width,)
        return parts | {name: [Part(name, shape)] for name, shape in whole.items()}

    def adapted_parts(self) -> dict[str, list[Part]]:
        """Those of ``weight_parts`` that LoRA adapters add to: the matrices of layers, but for experts."""
        return {
            name: parts
            for name, parts in self.weight_parts().items()
            if is_matrix(name) and name != LM_HEAD and not is_of_experts(name)
        }

    def derived_tensors(self) -> list[str]:
        """Tensors that a checkpoint may contain besides; a name that ends with a dot stands for all that begin so."""
        frequencies = [f"{layer_prefix(index)}self_attn.rotary_emb.inv_freq" for index in range(self.num_layers)]
        return [*frequencies, LM_HEAD] if self.tie_word_embeddings else frequencies

    def gain(self, weight: "Tensor") -> "Tensor":
        """The gain of a norm from its weight, in float32 if they differ."""
        return weight.float() + self.norm_offset if self.norm_offset else weight

    @cached_property
    def _num_weights(self) -> tuple[int, int]:
        """Weights of matrices without the LM head: those that every token has, and those of experts."""
        counts = [0, 0]
        for name, parts in self.weight_parts().items():
            if is_matrix(name) and name != LM_HEAD:
                counts[is_of_experts(name)] += prod(fused_shape(parts))
        return counts[0], counts[1]

    def num_read(self, num_tokens: float) -> float:
        """Number of weights that a step of so many tokens reads, without the LM head; of experts those that it uses."""
        common, of_experts = self._num_weights
        return common + of_experts * self.expert_share(num_tokens)

    def read_share(self, num_tokens: float) -> float:
        """Share of all weights of matrices that a step of so many tokens reads, the LM head among them."""
        return (self.num_read(num_tokens) + self.num_head) / (sum(self._num_weights) + self.num_head)

    @property
    def num_multiplied(self) -> int:
        """Number of weights that multiply each token, without the LM head."""
        return round(self.num_read(1))

    @property
    def num_head(self) -> int:
        """Weights of the LM head."""
        return self.vocab_size * self.hidden_size

    def flops(self, num_new: npt.NDArray[np.int64], context: npt.NDArray[np.int64], num_samples: int) -> int:
        """Floating-point operations of a step; a multiply-add is two. Products and attention are counted.

        Args:
            num_new: Tokens of each sequence that the step computes, ``[B]``.
            context: Tokens of each sequence after the step, ``[B]``.
            num_samples: Rows of logits.
        """
        products = 2 * int(num_new.sum()) * self.num_multiplied + 2 * num_samples * self.num_head
        return products + self.attention_flops(num_new, context)

    def attention_flops(self, num_new: npt.NDArray[np.int64], context: npt.NDArray[np.int64]) -> int:
        """The attention part of ``flops``; windows reduce it."""
        seen = 0
        first = context - num_new
        for window, num_layers in self._window_counts.items():
            num_short = np.clip(window - first, 0, num_new) if window else num_new  # see all tokens before them
            visible = num_short * first + num_short * (num_short + 1) // 2 + (num_new - num_short) * window
            seen += num_layers * int(visible.sum())
        return 4 * self.num_heads * self.head_dim * seen

    def read_kv_bytes(self, num_new: npt.NDArray[np.int64], context: npt.NDArray[np.int64], dtype: str) -> int:
        """Bytes of keys and values that a step must read, each once; arguments as of ``flops``."""
        num_read = 0
        for window, num_layers in self._window_counts.items():
            read = np.minimum(context, num_new + (window - 1)) if window else context
            num_read += num_layers * int(read.sum())
        return num_read * self.kv_bytes_per_token(dtype) // self.num_kv_layers

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of a token's keys and values in all layers, stored as ``dtype``, of ``DTYPE_BYTES`` or ``KV_CODES``."""
        head_bytes = self.head_dim + _KV_SCALE_BYTES if dtype in KV_CODES else self.head_dim * DTYPE_BYTES[dtype]
        return 2 * self.num_kv_layers * self.num_kv_heads * head_bytes

    @cached_property
    def _window_counts(self) -> Counter[int]:
        return Counter(self.windows)
