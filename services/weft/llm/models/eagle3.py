"""EAGLE-3: a head of one layer that reads hidden states of three layers of its target.

Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test", 2025,
https://arxiv.org/abs/2503.01840. Folders are those of SpecForge and EAGLE, and of vLLM's speculators.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer, LayerSettings, StepInput
from weft.llm.models.fields import Fields, count, fault, flag
from weft.llm.models.heads import HeadConfig, HeadLayer, renamed
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.parts import EMBEDDING, LM_HEAD, Part

if TYPE_CHECKING:
    from torch import Tensor

    from weft.llm.parallel.groups import Group
    from weft_kernels.blocks.layout import KVLayer

_JOIN = "model.fc_proj.weight"
_NUM_TAPS = 3
_NAMES = (
    "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "LlamaForCausalLM",
)  # fmt: skip


class Eagle3Layer(HeadLayer):
    """A decoder layer whose attention reads embeddings and states side by side; the states are its residual stream."""

    #: The residual stream begins with the normed states.
    norms_residual = False

    def __init__(
        self, settings: LayerSettings, weights: "Mapping[str, Tensor]", linear: Mapping[str, ops.Linear]
    ) -> None:
        super().__init__(settings, weights, linear)
        self._hidden_norm = weights[settings.prefix + "hidden_norm.weight"]
        self._join = linear[_JOIN]

    @override
    def merged(self, states: "Tensor") -> "Tensor":
        return self._join(states)

    @override
    def forward(
        self, hidden: "Tensor", residual: "Tensor | None", step: StepInput, kv_layer: "KVLayer"
    ) -> "tuple[Tensor, Tensor]":
        width, residual = hidden.shape[1], cast("Tensor", residual)
        states, _ = ops.rms_norm(residual, self._hidden_norm, self._eps)
        both = hidden.new_empty(len(hidden), 2 * width)
        both[:, :width], both[:, width:] = ops.rms_norm(hidden, self._attention_norm, self._eps)[0], states
        x = self.attend(both, step, kv_layer)
        x, residual = ops.rms_norm(x, self._mlp_norm, self._eps, states if self.norms_residual else residual)
        return self.feed_forward(x), residual


@dataclass(frozen=True)
class Eagle3(HeadConfig):
    """Configuration of an EAGLE-3 head.

    Attributes:
        target_hidden_size: Width of the target's hidden states.
        norm_before_residual: The residual stream begins with the normed states.
    """

    architecture = "EAGLE-3"
    defaults: ClassVar = {"max_position_embeddings": 2048}
    layer_class = Eagle3Layer
    ignored = ("sliding_window", "max_window_layers", "norm_before_residual", "tie_word_embeddings")
    own_taps = (1,)

    target_hidden_size: int = 0
    norm_before_residual: bool = False

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        fields = super().fields_of(values)
        for name, only in (("use_sliding_window", False), ("norm_output", True), ("norm_before_fc", False)):
            if values.get(name, only) is not only:
                raise fault(name, f"{only}, or absent: heads with another value are not supported", values.get(name))
        if fields["num_layers"] != 1:
            raise fault("num_hidden_layers", "1: heads of several layers are not supported", fields["num_layers"])
        own = {"tie_word_embeddings": False, "norm_before_residual": flag(values, "norm_before_residual")}
        return fields | own | {"draft_vocab_size": count(values, "draft_vocab_size", fields["vocab_size"])}

    @override
    def layer(
        self,
        index: int,
        weights: "Mapping[str, Tensor]",
        linear: Mapping[str, ops.Linear],
        *,
        deterministic: bool,
        tensor: "Group | None" = None,
    ) -> DecoderLayer:
        layer = cast("Eagle3Layer", super().layer(index, weights, linear, deterministic=deterministic, tensor=tensor))
        layer.norms_residual = self.norm_before_residual
        return layer

    @override
    def weight_parts(self) -> dict[str, list[Part]]:
        parts = super().weight_parts()
        parts[_JOIN] = [Part("fc.weight", (self.hidden_size, _NUM_TAPS * self.target_hidden_size))]
        parts[LM_HEAD] = [Part(LM_HEAD, (self.draft_vocab_size, self.hidden_size))]
        for name, is_there in ((EMBEDDING, self.has_embedding), (LM_HEAD, self.has_lm_head)):
            if not is_there:
                del parts[name]
        return renamed(parts, {"model.layers.0.": self.tensor_prefix, "model.": ""})

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        parts = super().layer_parts(prefix)
        qkv = prefix + "self_attn.qkv_proj.weight"
        parts[qkv] = [part._replace(shape=(part.shape[0], 2 * self.hidden_size)) for part in parts[qkv]]
        return parts | {f"{prefix}hidden_norm.weight": [Part(f"{prefix}hidden_norm.weight", (self.hidden_size,))]}

    @override
    def derived_tensors(self) -> list[str]:
        return ["d2t", "t2d"]


def eagle3_config(config: Mapping[str, Any], tensors: Collection[str], target: TransformerConfig) -> Eagle3:
    """Convert the parsed ``config.json`` of a head for ``target``; ``tensors``: names of those in its folder.

    Raises:
        InvalidArgumentError: The head is not supported, or is of another target; the message names the field.
    """
    named = config.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in _NAMES:
        raise fault("architectures", f"that of an EAGLE-3 head, one of {', '.join(_NAMES)}", named)
    nested = config.get("transformer_layer_config", {})
    if not isinstance(nested, Mapping):
        raise fault("transformer_layer_config", "an object", nested)
    values = Fields({**config, **nested})
    width = count(values, "target_hidden_size", target.hidden_size)
    if width != target.hidden_size:
        raise fault("target_hidden_size", f"{target.hidden_size}, the hidden_size of the model", width)
    made = Eagle3.from_json(values)
    has_embedding, has_lm_head = "embed_tokens.weight" in tensors, LM_HEAD in tensors
    for name, has_own in (("hidden_size", has_embedding and has_lm_head), ("draft_vocab_size", has_lm_head)):
        allowed = target.hidden_size if name == "hidden_size" else target.vocab_size
        if not has_own and getattr(made, name) != allowed:
            raise fault(name, f"{allowed}, that of the model, whose tensors it shares", getattr(made, name))
    return replace(
        made,
        taps=_taps(values, target.num_layers),
        target_hidden_size=width,
        has_embedding=has_embedding,
        has_lm_head=has_lm_head,
        tensor_prefix="layers.0." if "layers.0.hidden_norm.weight" in tensors else "midlayer.",
        max_position_embeddings=target.max_context_len,
    )


def _taps(values: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers after which states are taken: vLLM counts them, SpecForge has the index of each."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested = values.get("eagle_config") or {}
    if not isinstance(nested, Mapping) or not nested.get("use_aux_hidden_state", True):
        raise fault("eagle_config", "an object, of a head that reads states of three layers", nested)
    given, first = (values.get(name), 0) if values.get(name) else (nested.get(name), 1)
    if not given:
        given, first = [2, num_layers // 2, num_layers - 3], 0
    is_list = isinstance(given, list) and all(type(each) is int for each in given)
    if not is_list or len({*given}) != _NUM_TAPS or not all(0 <= each + first <= num_layers for each in given):
        raise fault(name, f"{_NUM_TAPS} different layers of the model, which has {num_layers}", given)
    return tuple(each + first for each in given)
