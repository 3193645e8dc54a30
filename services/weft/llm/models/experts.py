"""``MixtureConfig``: what architectures with experts have in common. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from typing_extensions import override

from weft.llm.models.fields import count, fault, flag
from weft.llm.models.mlp import Routing
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.parts import Part, is_of_experts

#: Fields of ``config.json`` with their names in GGUF files.
GGUF_COUNTS = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
#: Fields of ``config.json`` with the number of experts, of which files have one.
_NUM_EXPERTS = ("num_experts", "num_local_experts")


@dataclass(frozen=True)
class MixtureConfig(TransformerConfig):
    """A decoder in whose layers, or some of them, a router chooses a few of many MLPs for each token.

    Attributes:
        expert_size: Width of an expert; ``intermediate_size`` is that of layers without.
        shared_size: Width of the expert that all tokens have; 0: none.
        dense_layers: Layers without experts.
    """

    #: Prefix of the tensors of router and experts behind that of the layer; its tensors of gate, up and down.
    block: ClassVar[str] = "mlp."
    #: Field of ``config.json`` with the width of an expert.
    size_field: ClassVar[str] = "moe_intermediate_size"
    projections: ClassVar[tuple[str, str, str]] = ("gate_proj", "up_proj", "down_proj")

    num_experts: int = 2
    num_chosen: int = 1
    expert_size: int = 1
    shared_size: int = 0
    is_normalized: bool = True
    dense_layers: tuple[int, ...] = ()

    @classmethod
    @override
    def fields_of(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        counts = {name: count(values, name) for name in _NUM_EXPERTS if name in values}
        if len(set(counts.values())) != 1 or 1 in counts.values():
            raise fault("num_experts", "a whole number above 1", counts or None)
        num_experts, num_chosen = next(iter(counts.values())), count(values, "num_experts_per_tok")
        if num_chosen > num_experts:
            raise fault("num_experts_per_tok", f"at most the number of experts, {num_experts}", num_chosen)
        listed, step = values.get("mlp_only_layers") or [], count(values, "decoder_sparse_step", 1)
        if not isinstance(listed, list) or any(type(index) is not int for index in listed):
            raise fault("mlp_only_layers", "a list of indices of layers", listed)
        fields, own = super().fields_of(values), {"num_experts": num_experts, "num_chosen": num_chosen}
        own |= {"expert_size": count(values, cls.size_field), "is_normalized": flag(values, "norm_topk_prob", True)}
        layers = range(fields["num_layers"])
        return fields | own | {"dense_layers": tuple(each for each in layers if each in listed or (each + 1) % step)}

    @property
    @override
    def routing(self) -> Routing:
        return Routing(self.num_experts, self.num_chosen, self.is_normalized)

    @property
    @override
    def divided(self) -> dict[str, int]:
        counts = super().divided | {"num_experts": self.num_experts}
        if not self.dense_layers:
            del counts["intermediate_size"]
        return counts | ({"shared_expert_intermediate_size": self.shared_size} if self.shared_size else {})

    @override
    def of_rank(self, size: int) -> Self:
        own = super().of_rank(size)
        return replace(own, num_experts=self.num_experts // size, shared_size=self.shared_size // size)

    @override
    def num_experts_of(self, name: str) -> int:
        return self.num_experts if is_of_experts(name) else 1

    @override
    def expert_share(self, num_tokens: float) -> float:
        return float(1.0 - (1.0 - self.num_chosen / self.num_experts) ** num_tokens)

    @property
    @override
    def mlp_width(self) -> int:
        expert = self.num_chosen * (3 * self.expert_size + 2 * self.hidden_size) // 3
        return max(super().mlp_width, expert + self.shared_size)

    @override
    def layer_parts(self, prefix: str) -> dict[str, list[Part]]:
        parts = super().layer_parts(prefix)
        if int(prefix.split(".")[-2]) in self.dense_layers:
            return parts
        width, size = self.hidden_size, self.expert_size
        gate, up, down = self.projections
        for name in ("gate_up_proj", "down_proj"):
            del parts[f"{prefix}mlp.{name}.weight"]
        experts = [f"{prefix}{self.block}experts.{index}." for index in range(self.num_experts)]
        parts |= {
            prefix + "mlp.gate.weight": [Part(f"{prefix}{self.block}gate.weight", (self.num_experts, width))],
            prefix + "mlp.experts.gate_up_proj.weight": [
                Part(f"{expert}{name}.weight", (size, width)) for expert in experts for name in (gate, up)
            ],
            prefix + "mlp.experts.down_proj.weight": [
                Part(f"{expert}{down}.weight", (width, size)) for expert in experts
            ],
        }
        if self.shared_size:
            shared, own = f"{prefix}mlp.shared_expert", (self.shared_size, width)
            parts |= {
                f"{shared}_gate.weight": [Part(f"{shared}_gate.weight", (1, width))],
                f"{shared}.gate_up_proj.weight": [Part(f"{shared}.{name}.weight", own) for name in (gate, up)],
                f"{shared}.down_proj.weight": [Part(f"{shared}.{down}.weight", own[::-1])],
            }
        return parts
