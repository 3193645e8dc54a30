"""EAGLE-3 and MTP heads: their drafts are those of their published definitions, whatever happened to their cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from benchmarks.language_model.plain_heads import PlainHead, Sizes, greedy_drafts, llama_states
from benchmarks.language_model.trained_heads import plain_head, tensors_of
from tests.unit.llm.engine_fixture import MODEL, Answer, answer_in_turn, make_engine, random_prompts, serve
from tests.unit.llm.permutation_model import permutation, permutation_weights
from tests.unit.llm.speculation.heads import TAPS, head_config, random_target_ids, trained_head
from tests.unit.llm.speculation.proposers import Scripted

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
        Answer(prompt, max_tokens=16, n=1 + index % 2) for index, prompt in enumerate(random_prompts(6, 3, 40, seed=9))
    ]
    serve(answers, model=pair.model, speculator=Speculator(name, FixedDepth(3)), proposer=pair.proposer, **engine)
    pair.check(answers)


@_METHODS
@pytest.mark.parametrize("num_shared", [16, 20])
def test_states_of_cached_prefixes_are_kept(name: str, num_shared: int) -> None:
    """Behind a prefix of whole blocks, and of more, whose next token differs, drafts are right from the first on."""
    pair = Pair(name)
    shared = random_prompts(1, num_shared, num_shared, seed=4)[0]
    answers = [Answer([*shared, *own], max_tokens=15) for own in ([7, 8, 9], [11], [12, 13])]
    speculator = Speculator(name, FixedDepth(3))
    engine = make_engine(model=pair.model, block_size=4, speculator=speculator, proposer=pair.proposer)
    answer_in_turn(engine, [[answer] for answer in answers])
    assert [answer.deltas[0].num_cached_tokens for answer in answers] == [0, num_shared, num_shared]
    pair.check(answers)


@_METHODS
@pytest.mark.parametrize("num_idle", [3, 63, 64, 100])
def test_what_was_not_computed_is_caught_up_on(name: str, num_idle: int) -> None:
    """After many steps without drafts, in which sequences came and went, drafts are those of the definition."""
    pair = Pair(name)
    answers = [
        Answer(prompt, max_tokens=20 + 25 * index) for index, prompt in enumerate(random_prompts(5, 3, 30, seed=8))
    ]
    speculator = Speculator(name, Scripted([0] * num_idle + [2]))
    serve(answers, model=pair.model, max_num_seqs=3, block_size=4, speculator=speculator, proposer=pair.proposer)
    pair.check(answers)


@_METHODS
def test_trained_heads_are_accepted(name: str) -> None:
    """A head that learned what its target says gets nearly all drafts accepted, at T=0 and T=0.5."""
    config = replace(MODEL, vocab_size=32, max_position_embeddings=64)
    weights = permutation_weights(config, 1, epsilon=0.0)
    successors = torch.from_numpy(permutation(config.vocab_size, 1))
    head_config_, own = trained_head(name, config, dict(weights), successors)
    for temperature in (0.0, 0.5):
        model = TransformerModel(config, dict(weights), deterministic=True)
        proposer = HeadProposer(DraftHead(head_config_, dict(own), model), 64)
        speculator = Speculator(name, FixedDepth(3))
        with_drafts, without = (
            [Answer([start], max_tokens=40, temperature=temperature, seed=start) for start in range(3)]
            for _ in range(2)
        )
        serve(with_drafts, model=model, speculator=speculator, proposer=proposer)
        serve(without, model=model)
        assert [answer.text for answer in without] == [answer.text for answer in with_drafts]
        assert speculator.num_accepted >= 0.9 * speculator.num_drafts
