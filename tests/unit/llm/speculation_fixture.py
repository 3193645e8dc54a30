"""Proposers whose acceptance a test decides, and speculators of them."""

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from tests.unit.llm.engine_fixture import VOCAB_SIZE, Answer
from torch import Tensor

from weft.llm.device_state import DeviceState
from weft.llm.scheduler.plan import ForwardPlan, draft_rows
from weft.llm.speculation.speculator import FixedDepth, Speculator

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

    def speculator(self, num_drafts: int) -> Speculator:
        """A speculator that always asks for ``num_drafts``, on the host."""
        return Speculator("ngram", FixedDepth(num_drafts), lambda max_len: _OnHost(self))


class _OnHost:
    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle

    def propose(self, tokens: "array[int]", num_drafts: int) -> Sequence[int]:
        """See ``Proposer``."""
        return self._oracle.next_tokens(tokens.tolist(), num_drafts)

    def observe(self, drafts: Sequence[int], samples: Sequence[int]) -> None:
        """See ``Proposer``."""
        assert len(samples) == len(drafts) + 1


class OnDevice:
    """A proposer in the runner that follows each slot's tokens by what it sees, and asks an oracle."""

    def __init__(self, oracle: Oracle) -> None:
        self._oracle = oracle
        self._tokens: dict[int, dict[int, int]] = {}
        self.num_filled = 0

    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        """See ``DeviceProposer``."""

    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """See ``DeviceProposer``."""
        known: npt.NDArray[np.int32] = token_ids.numpy()
        for index, slot in enumerate(plan.slots.tolist()):
            if slot in plan.new_slots:
                self._tokens[slot] = {}
            rows = range(int(plan.q_start[index]), int(plan.q_start[index + 1] - plan.num_drafts[index]))
            self._tokens[slot] |= {int(plan.positions[row]): int(known[row]) for row in rows}
            num_drafts = int(plan.num_drafts[index])
            if num_drafts:
                first = rows.stop
                tokens = [
                    token for position, token in sorted(self._tokens[slot].items()) if position < plan.positions[first]
                ]
                drafts = self._oracle.next_tokens(tokens, num_drafts)
                known[first : first + num_drafts] = [*drafts, *[0] * (num_drafts - len(drafts))]
                self.num_filled += num_drafts
        assert (known >= 0).all()
        assert len(draft_rows(plan)) == plan.num_drafts.sum()

    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        """See ``DeviceProposer``."""
        assert len(hidden) == len(plan.token_ids)
        assert (num_accepted <= plan.num_drafts).all()
        token_ids = plan.token_ids
        for index, slot in enumerate(plan.slots.tolist()):
            end = int(plan.q_start[index + 1])
            for row in range(
                end - int(plan.num_drafts[index]), end - int(plan.num_drafts[index]) + int(num_accepted[index])
            ):
                self._tokens[slot][int(plan.positions[row])] = int(token_ids[row])


def device_options(oracle: Oracle, num_drafts: int) -> dict[str, Any]:
    """Options of ``make_engine`` for drafts that are made on the device."""
    return {"speculator": Speculator("draft", FixedDepth(num_drafts)), "proposer": OnDevice(oracle)}
