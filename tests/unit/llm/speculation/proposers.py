"""Every proposer, ready for ``make_engine``."""

import random
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tests.unit.llm.engine_fixture import MODEL, SHAPES, VOCAB_SIZE, Answer
from tests.unit.llm.speculation.heads import random_head
from typing_extensions import override

from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.speculation.draft_model import DraftModelProposer
from weft.llm.speculation.heads import HeadProposer
from weft.llm.speculation.speculator import AdaptiveDepth, FixedDepth, Speculator

#: "self" is a draft model that equals the target, so that every draft is right; of "close" most are, of "draft" few.
NAMES = ("draft", "close", "self", "eagle3", "mtp")
#: Sampling parameters of every kind, whose tokens drafts must not change.
SAMPLING_KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 1.0, "seed": 4, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"frequency_penalty": 1.5, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.8, "seed": 5, "repetition_penalty": 1.5, "logit_bias": ((3, 4.0), (7, -5.0))},
    {"temperature": 1.0, "seed": 6, "min_tokens": 9, "stop_token_ids": tuple(range(40))},
    {"temperature": 1.0, "seed": 7, "stop_token_ids": (1, 2, 3, 4, 5, 6)},
    {"temperature": 1.0, "seed": 8, "n": 3},
]


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
def close() -> TransformerModel:
    """The target with a little noise on its weights."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: weight + 0.02 * weight.std() * torch.randn(weight.shape, generator=generator)
        for name, weight in random_weights(MODEL, seed=3).items()
    }
    return TransformerModel(MODEL, weights)


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
    if name in ("eagle3", "mtp"):
        own = TransformerModel(MODEL, dict(random_weights(MODEL, seed=3)), deterministic=True)
        proposer = HeadProposer(random_head(name, own), max_num_tokens)
        return {"model": own, "speculator": Speculator(name, policy), "proposer": proposer}
    draft = model or {"self": target, "close": close, "draft": other}[name]()
    return {"speculator": Speculator("draft", policy), "proposer": DraftModelProposer(draft, max_num_tokens)}


class Oracle:
    """Knows answers that were given, and proposes their next tokens; of these some are wrong."""

    def __init__(self, answers: Sequence[Answer], error_rate: float) -> None:
        self._texts = [(answer.request.prompt_ids.tolist(), tokens) for answer in answers for tokens in answer.tokens]
        self._random = random.Random(5)
        self._error_rate = error_rate

    def next_tokens(self, tokens: list[int], num_drafts: int) -> list[int]:
        """The tokens after ``tokens``, as far as they are known, some of them changed."""
        for prompt, output in self._texts:
            known = prompt + output
            if known[: len(tokens)] == tokens:
                drafts = known[len(tokens) : len(tokens) + num_drafts]
                break
        else:
            drafts = [self._random.randrange(VOCAB_SIZE) for _ in range(num_drafts)]
        return [(token + (self._random.random() < self._error_rate)) % VOCAB_SIZE for token in drafts]

    def speculator(self, num_drafts: int, *balance: Any) -> Speculator:
        """A speculator that always asks for ``num_drafts``, on the host; unless ``balance`` and its clock stop it."""
        return Speculator("ngram", FixedDepth(num_drafts), lambda max_len: _OnHost(self), *balance)


class _OnHost:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def propose(self, tokens: "array[int]", num_drafts: int) -> Sequence[int]:
        """See ``Proposer``."""
        return self._oracle.next_tokens(tokens.tolist(), num_drafts)
