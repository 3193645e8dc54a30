"""``HeadConfig``: a layer that drafts for a target, from its hidden states and the embeddings of next tokens."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Self

from typing_extensions import override

from weft.llm.models.decoder import DecoderLayer
from weft.llm.models.fields import DTYPE_BYTES
from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.parts import Part

if TYPE_CHECKING:
    from torch import Tensor


class HeadLayer(DecoderLayer):
    """A decoder layer whose ``hidden`` are embeddings of next tokens, and whose ``residual`` are states."""

    def merged(self, states: "Tensor") -> "Tensor":
        """States ``[T, hidden_size]`` from those of the target's layers side by side."""
        return states


@dataclass(frozen=True)
class HeadConfig(TransformerConfig):
    """The head of one target: a transformer of one layer, whose input is the target's state of a token and the next.

    Attributes:
        taps: Layers of the target whose outputs make up a state (``TransformerModel.taps``); none: its last state.
        own_taps: The same of the head, whose state stands for the target's from the second draft on.
        has_embedding: Its folder has embeddings; else they are the target's.
        has_lm_head: Its folder has an LM head; else it is the target's.
        draft_vocab_size: Tokens that it can draft; 0: all of the target's. Its ``d2t`` says which.
        tensor_prefix: Begin of the names of its layer's tensors.
    """

    own_taps: ClassVar[tuple[int, ...]] = ()

    taps: tuple[int, ...] = ()
    has_embedding: bool = False
    has_lm_head: bool = False
    draft_vocab_size: int = 0
    tensor_prefix: str = ""

    @classmethod
    def of(cls, target: TransformerConfig) -> Self:
        """The head that a checkpoint of ``target`` has."""
        values = {each.name: getattr(target, each.name) for each in fields(target)}
        return cls(**values | {"num_layers": 1, "sliding_layers": ()})

    @override
    def kv_bytes_per_token(self, dtype: str) -> int:
        return super().kv_bytes_per_token(dtype) + self.hidden_size * DTYPE_BYTES[dtype]  # its state is kept too


def renamed(parts: Mapping[str, list[Part]], prefixes: Mapping[str, str]) -> dict[str, list[Part]]:
    """``parts`` whose tensors have other names in the checkpoint: the first prefix that fits is replaced."""

    def rename(part: Part) -> Part:
        old = next((old for old in prefixes if part.name.startswith(old)), "")
        return part._replace(name=prefixes.get(old, "") + part.name.removeprefix(old))

    return {name: [rename(part) for part in each] for name, each in parts.items()}
