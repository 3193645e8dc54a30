"""Every proposer, ready for ``make_engine``."""

from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from tests.unit.llm.engine_fixture import MODEL, SHAPES
from tests.unit.llm.permutation_model import permutation
from typing_extensions import override

from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.head_training import HeadTraining, train_heads
from weft.llm.speculation.lookahead import LookaheadProposer
from weft.llm.speculation.medusa import Head, MedusaHeads, MedusaProposer
from weft.llm.speculation.speculator import AdaptiveDepth, FixedDepth, Speculator
from weft.llm.weights.parts import EMBEDDING, LM_HEAD

#: "self" is a draft model that equals the target, so that every draft is right.
NAMES = ("draft", "self", "medusa", "lookahead")


@cache
def target() -> TransformerModel:
    """The model that ``make_engine`` runs by default, deterministic."""
    return TransformerModel(MODEL, dict(random_weights(MODEL, seed=3)), deterministic=True)


@cache
def other() -> TransformerModel:
    """A model of another width and depth with the same vocabulary; most of its drafts are wrong."""
    config = SHAPES["wide"]
    return TransformerModel(config, dict(random_weights(config, seed=8)))


@cache
def random_heads() -> MedusaHeads:
    """Eight heads without sense."""
    width = MODEL.hidden_size
    generator = torch.Generator().manual_seed(1)
    shapes = ((2 * width, width), (width, width), (width,))
    heads = [Head(*(0.3 * torch.randn(shape, generator=generator) for shape in shapes)) for _ in range(8)]
    return MedusaHeads(heads, "")


def trained_heads(model: TransformerModel, weights: dict[str, torch.Tensor], seed: int, num_heads: int) -> MedusaHeads:
    """Heads that know a permutation model by heart."""
    following, tokens = permutation(model.config.vocab_size, seed), [0]
    for _ in range(1279):
        tokens.append(int(following[tokens[-1]]))
    training = HeadTraining(num_heads=num_heads, num_steps=300)
    heads, _ = train_heads(model, weights[EMBEDDING], weights[LM_HEAD], np.array(tokens), training)
    return MedusaHeads(heads, "")


class Scripted(FixedDepth):
    """So many drafts in the first steps with decodes, the last number ever after."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script: list[int] = []
        super().__init__(max(script))
        self._script = list(script)

    @override
    def begin(self, num_rows: int, *, is_greedy: bool = True) -> None:
        if self._script:
            self._max_drafts = self._script.pop(0)
        super().begin(num_rows, is_greedy=is_greedy)


def options(
    name: str, depth: int | AdaptiveDepth, *, model: TransformerModel | None = None, max_num_tokens: int = 64
) -> dict[str, Any]:
    """Options of ``make_engine`` for a proposer of ``NAMES`` with ``depth`` drafts; ``model``: another draft model."""
    policy = FixedDepth(depth) if isinstance(depth, int) else depth
    if name == "lookahead":
        return {"speculator": Speculator(name, policy, LookaheadProposer)}
    if name == "medusa":
        return {"speculator": Speculator(name, policy), "proposer": MedusaProposer(target(), random_heads())}
    draft = model or (target() if name == "self" else other())
    return {"speculator": Speculator("draft", policy), "proposer": DraftModelProposer(draft, max_num_tokens)}


def ids(tokens: Sequence[int]) -> "array[int]":
    """Tokens as a sequence has them."""
    return array("i", tokens)
