"""Proposer that asks Medusa heads on the model's own hidden states: ``MedusaProposer``."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.llm import ops
from weft.llm.device_state import DeviceState
from weft.llm.models.model import TransformerModel
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.speculation.medusa_heads import MedusaHeads


class _Observed(NamedTuple):
    """The arguments of ``observe``."""

    plan: ForwardPlan
    hidden: Tensor
    num_accepted: npt.NDArray[np.int32]


class MedusaProposer:
    """A ``DeviceProposer``: a chain of drafts from the hidden state that the newest token was sampled from.

    Each draft is drawn with the target's noise and sampling parameters, but without penalties and biases, and its
    embedding goes into the next head. A draft costs a product with a ``[2 * H, H]`` and an ``[H, H]`` matrix, and one
    with the LM head.

    Args:
        model: The target.
        heads: Trained on it; at least as many as the most drafts of a sequence.

    Source:
        Medusa, https://arxiv.org/abs/2401.10774, as a chain rather than a tree; heads as in Hydra,
        https://arxiv.org/abs/2402.05109; noise shared with the target, https://arxiv.org/abs/2408.07978.
    """

    def __init__(self, model: TransformerModel, heads: MedusaHeads) -> None:
        self._model = model
        self._heads = heads.heads

    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        """See ``DeviceProposer``."""
        del num_blocks, block_size  # heads have no cache
        self._state = state
        self._hidden = torch.zeros(
            state.num_slots, self._model.config.hidden_size, dtype=self._model.dtype, device=self._model.device
        )
        self._last: _Observed | None = None

    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """See ``DeviceProposer``."""
        chosen = np.flatnonzero(plan.num_drafts)
        last, self._last = self._last, None
        # Where the same sequences go on, this step has newer states of all of them, and most steps have no drafts.
        if last is not None and (len(chosen) or not np.array_equal(last.plan.slots, plan.slots)):
            self._store(last)
        if not len(chosen):
            return
        upload = self._state.upload
        counts, slots = plan.num_drafts[chosen], upload(plan.slots[chosen])
        rows = plan.q_start[chosen + 1] - counts - 1  # of the last known token
        hidden, tokens = self._hidden.index_select(0, slots), token_ids.index_select(0, upload(rows))
        for index in range(int(counts.max())):
            if index and (counts == index).any():
                left = counts > index
                counts, rows = counts[left], rows[left]
                kept = upload(np.flatnonzero(left))
                slots, hidden, tokens = (part.index_select(0, kept) for part in (slots, hidden, tokens))
            hidden = self._heads[index].advance(hidden, self._model.embed(tokens))
            params = self._state.sampling(slots)
            tokens = ops.sample(
                self._model.logits(hidden),
                params.temperature,
                params.top_k,
                params.top_p,
                params.min_p,
                params.seeds,
                upload(plan.positions[rows] + (index + 1)),
            )
            token_ids.index_put_((upload(rows + (index + 1)),), tokens)

    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        """See ``DeviceProposer``."""
        self._last = _Observed(plan, hidden, num_accepted)

    def _store(self, last: _Observed) -> None:
        """Keep the hidden states of a step by slot; the target's next forward pass may write over them."""
        plan, upload = last.plan, self._state.upload
        rows = upload(plan.q_start[1:] - 1 - plan.num_drafts + last.num_accepted)
        self._hidden.index_copy_(0, upload(plan.slots.astype(np.int64)), last.hidden.index_select(0, rows))
