"""EAGLE-3 and MTP heads: their drafts are those of their published definitions, whatever happened to their cache."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.language_model.plain_heads import PlainHead, Sizes, greedy_drafts, llama_states
from tests.unit.llm.engine_fixture import MODEL, Answer, random_prompts, serve
from tests.unit.llm.speculation.heads import TAPS, head_config, plain_head, random_target_ids, tensors_of

from weft.llm.models.model import TransformerModel
from weft.llm.models.weights import random_weights
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.speculation.heads import DraftHead, HeadProposer
from weft.llm.speculation.speculator import FixedDepth, Speculator

_METHODS = pytest.mark.parametrize("name", ["eagle3", "mtp"])
_SIZES = Sizes(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)


class Drafts(NamedTuple):
    """Guesses behind the token at ``position``."""

    position: int
    token: int
    guesses: list[int]


class Watched(HeadProposer):
    """Keeps the drafts of all sequences."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[Drafts] = []

    def propose(self, plan: ForwardPlan, token_ids: torch.Tensor) -> None:
        """See ``DeviceProposer``."""
        super().propose(plan, token_ids)
        for index in np.flatnonzero(plan.num_drafts):
            row, end = plan.q_start[index + 1] - 1 - plan.num_drafts[index], plan.q_start[index + 1]
            drafts = token_ids[row + 1 : end].tolist()
            self.seen.append(Drafts(int(plan.positions[row]), int(token_ids[row]), drafts))


class Pair:
    """A random target and head, in the engine's classes and in plain torch."""

    def __init__(self, name: str) -> None:
        weights, config = random_weights(MODEL, seed=3), head_config(name, MODEL)
        self.target_tensors = tensors_of(MODEL, weights)
        self.model = TransformerModel(MODEL, dict(weights), deterministic=True)
        own = random_weights(config, 4)
        self.plain: PlainHead = plain_head(name, config, own, self.target_tensors)
        ids = self.ids = random_target_ids(config)
        self.proposer = Watched(DraftHead(config, dict(own), self.model, target_ids=ids), 512)

    def expected(self, text: Sequence[int], seen: Drafts) -> list[int]:
        """The drafts in plain torch, behind the beginning of a text."""
        tokens = torch.tensor(text[: seen.position + 1])
        states = llama_states(tokens[:-1], self.target_tensors, _SIZES, MODEL.num_layers)
        fed = self.plain.states([states[layer] for layer in (TAPS if self.ids is not None else (-1,))])
        drafts = greedy_drafts(self.plain, tokens, fed, len(seen.guesses), self.ids)
        return drafts

    def check(self, answers: Sequence[Answer]) -> None:
        """Every draft is what the definition says for one of the texts."""
        texts = [answer.request.prompt_ids.tolist() + tokens for answer in answers for tokens in answer.tokens]
        assert len(self.proposer.seen) > 20
        for seen in self.proposer.seen:
            fitting = [text for text in texts if text[seen.position : seen.position + 1] == [seen.token]]
            assert seen.guesses in [self.expected(text, seen) for text in fitting]


@_METHODS
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4},
        {"max_num_batched_tokens": 9, "max_num_seqs": 4, "num_blocks": 24, "block_size": 4},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_drafts_are_those_of_the_definition(name: str, engine: dict[str, Any]) -> None:
    """Greedy drafts of many sequences, in chunks, after preemptions and forks, equal those of plain torch."""
    pair = Pair(name)
    answers = [
        Answer(prompt, max_tokens=25, n=1 + index % 2) for index, prompt in enumerate(random_prompts(6, 3, 40, seed=9))
    ]
    serve(answers, model=pair.model, speculator=Speculator(name, FixedDepth(3)), proposer=pair.proposer, **engine)
    pair.check(answers)
