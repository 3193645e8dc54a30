"""Interface of proposers that work on the device, inside the runner: ``DeviceProposer``."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from weft.llm.device_state import DeviceState
from weft.llm.scheduler.plan import ForwardPlan


class DeviceProposer(Protocol):
    """Guesses the next tokens of all sequences of a step: a draft model, or heads on hidden states.

    A plan says how many drafts each sequence gets (``ForwardPlan.num_drafts``), and has room for them: they are the
    last tokens of the sequence, with positions, cache slots in blocks that it owns, and sample rows. A draft that is
    not known on the host has the id -1 (``UNKNOWN_TOKEN``), and ``propose`` replaces it before the target's forward
    pass. So blocks, budget and depth are settled before a draft is made, and none is made in vain.

    Calls of each step, on the engine's thread under ``torch.inference_mode``: ``propose``, the target's forward pass
    and sampling, ``observe``. Both are called in every step, also if no sequence has drafts, so that a cache of its own
    can follow the target's. A step that fails may end between the two; its sequences end with it.

    A sequence keeps its slot while it runs. It gets drafts only in steps after one that sampled a token for it in this
    slot, so what ``observe`` stored by slot is from its latest step. ``plan.new_slots`` are slots whose contents are
    void: a new, resumed or forked sequence.
    """

    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        """Prepare for a runner's tables and KV cache; called once, before the first step.

        Args:
            state: Sampling parameters and block tables by slot, updated for the plan before ``propose``.
            num_blocks: Blocks of the target's KV cache. A cache of one's own that has as many can use the target's
                block tables and ``plan.slot_mapping``, and then prefix cache, copies and preemption hold for both,
                provided that ``propose`` applies ``plan.copies`` and every token of every plan gets its entry.
            block_size: Tokens of a block.
        """

    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """Replace each -1 in ``token_ids`` by a guess; other tokens must not change.

        To be accepted at temperatures above 0, draw with ``ops.sample`` from the row of ``DeviceState.sampling`` at the
        position of the draft: the target draws with the same noise, keyed by seed, position and token.

        Args:
            plan: The step. Of sequence ``b``, the drafts are the last ``num_drafts[b]`` tokens of its rows.
            token_ids: int32 ``[T]`` on the device; changed in place.
        """

    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        """See what the target computed, after the step's tokens are sampled.

        Args:
            plan: The step, as in ``propose``.
            hidden: The target's hidden states after the final norm, ``[T, hidden_size]``. Of sequence ``b``, the row
                that its newest token was sampled from is ``q_start[b + 1] - 1 - num_drafts[b] + num_accepted[b]``.
            num_accepted: Accepted drafts of each sequence, ``[B]``. A sequence in the middle of its prompt has 0.
        """
