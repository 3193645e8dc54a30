"""OLMo 2: norms after attention and MLP in place of those before, and over all heads of queries and keys together.

Team OLMo, "2 OLMo 2 Furious", 2025, https://arxiv.org/abs/2501.00656.
"""

from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from weft.llm import ops
from weft.llm.models.decoder import DecoderLayer, StepInput
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.gguf import GgufLayout
from weft.llm.weights.parts import Part

if TYPE_CHECKING:
    from torch import Tensor

    from weft_kernels.blocks.layout import KVLayer


class Olmo2Layer(DecoderLayer):
    """A decoder layer whose norms come after attention and MLP."""

    attention_norm = "post_attention_layernorm"
    mlp_norm = "post_feedforward_layernorm"

    @override
    def forward(
        self, hidden: "Tensor", residual: "Tensor | None", step: StepInput, kv_layer: "KVLayer"
    ) -> "tuple[Tensor, Tensor]":
        stream = hidden if residual is None else hidden + residual
        x, _ = ops.rms_norm(self.attend(stream, step, kv_layer), self._attention_norm, self._eps)
        stream = stream + x
        x, _ = ops.rms_norm(self.feed_forward(stream), self._mlp_norm, self._eps)
        return x, stream

    @override
    def _normed(self, heads: "Tensor", weight: "Tensor") -> "Tensor":
        group, own = self._settings.tensor, heads.shape[1] * heads.shape[2]
        if group is None or weight.shape[0] == self._settings.head_dim or group.size == 1:
            return super()._normed(heads, weight)
        num_equal = group.size * own // weight.shape[0]  # ranks that share a head of keys
        whole = group.all_gather(heads.flatten(1), 1).view(len(heads), -1, num_equal, own)[:, :, 0]
        normed = super()._normed(whole, weight)
        return normed[:, group.rank // num_equal].view(heads.shape)


class Olmo2(TransformerConfig):
    """Configuration of OLMo 2."""

    architecture = "Olmo2ForCausalLM"
    defaults: ClassVar = {
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "eos_token_id": 50279,
    }
    layer_class = Olmo2Layer
    gguf = GgufLayout(
        "olmo2",
        {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"},
    )

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        parts = super().layer_parts(prefix)
        del parts[prefix + "input_layernorm.weight"]
        norms = {
            "post_feedforward_layernorm": self.hidden_size,
            "self_attn.q_norm": self.num_heads * self.head_dim,
            "self_attn.k_norm": self.num_kv_heads * self.head_dim,
        }
        names = {f"{prefix}{name}.weight": width for name, width in norms.items()}
        return parts | {name: [Part(name, (width,))] for name, width in names.items()}
