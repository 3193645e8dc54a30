"""Stages of a pipeline: which layers and weights of a model each of them has. Imports no torch."""

from itertools import accumulate, pairwise
from math import prod
from typing import NamedTuple

from weft.llm.models.model_config import TransformerConfig
from weft.llm.weights.parts import EMBEDDING, LAYERS, fused_shape, layer_prefix


class Stage(NamedTuple):
    """Contiguous layers of a model. The first stage embeds tokens; the last has the final norm and the LM head.

    Attributes:
        has_embedding: The first, and where the LM head shares its weight, the last.
    """

    layers: range
    is_first: bool = True
    is_last: bool = True
    has_embedding: bool = True

    def has(self, name: str) -> bool:
        """Whether the weight ``name`` of ``TransformerConfig.weight_parts`` is the stage's."""
        if name.startswith(LAYERS):
            return int(name.removeprefix(LAYERS).partition(".")[0]) in self.layers
        return self.has_embedding if name == EMBEDDING else self.is_last


def stages(config: TransformerConfig, count: int) -> list[Stage]:
    """Divide a model into ``count`` stages, at most ``config.num_layers``.

    They have about the same number of weights, the embedding and the LM head counted: each cut is where the weights
    before it are closest to an even share, but every stage has a layer.
    """
    if count == 1:
        return [Stage(range(config.num_layers))]
    sizes = (
        sum(prod(fused_shape(parts)) for parts in config.layer_parts(layer_prefix(index)).values())
        for index in range(config.num_layers)
    )
    before = list(accumulate(sizes, initial=config.num_head))  # the embedding has as many weights as the LM head
    cuts = [0]
    for index in range(1, count):
        share = index * (before[-1] + config.num_head) / count
        allowed = range(cuts[-1] + 1, config.num_layers - count + index + 1)
        cuts.append(min(allowed, key=lambda cut: abs(before[cut] - share)))
    cuts.append(config.num_layers)
    return [
        Stage(
            range(first, end),
            not first,
            is_last := end == config.num_layers,
            not first or (is_last and config.tie_word_embeddings),
        )
        for first, end in pairwise(cuts)
    ]
