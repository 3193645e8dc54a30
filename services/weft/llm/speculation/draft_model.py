"""``DraftModelProposer``: a smaller model makes the drafts."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.llm.device_state import DeviceState
from weft.llm.models.model import TransformerModel
from weft.llm.scheduler.blocks import NULL_BLOCK
from weft.llm.scheduler.plan import ForwardPlan, Int32, Int64


class TokenRange(NamedTuple):
    """Consecutive tokens of some sequences, ``[N]`` each: slots, first positions and numbers of tokens."""

    slots: Int32
    first: Int64
    num_tokens: Int64


_ALL = np.iinfo(np.int64).max


class DraftCache:
    """Tracks the valid entries of the draft model's KV cache; an entry's place is ``block * block_size + offset``.

    When the target writes an entry, it belongs to another token, so the draft model's is invalid until it is
    recomputed.
    """

    def __init__(self, num_slots: int, num_columns: int, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._tables = np.zeros((num_slots, num_columns), np.int32)
        self._is_computed = np.zeros((num_blocks, block_size), np.bool_)
        self._num_checked = np.zeros(num_slots, np.int64)  # leading tokens of a slot that are known to be computed
        self._num_valid = np.full(num_slots, _ALL)

    def start(self, slots: Int32, num_valid: Int64) -> None:
        """Restrict to ``num_valid`` entries each what new sequences in ``slots`` share with others."""
        self._num_valid[slots] = num_valid

    def follow(self, plan: ForwardPlan) -> None:
        """Apply block tables and new slots of a plan, and invalidate the entries of all its tokens."""
        self._num_checked[plan.new_slots] = 0
        slots, columns, blocks = plan.table_delta.T
        self._tables[slots, columns] = blocks
        self._flat[plan.slot_mapping] = False
        self._is_computed[NULL_BLOCK] = True  # stands for blocks behind a window, which nobody needs

    def places(self, slots: Int32, positions: Int64) -> Int64:
        """Places of tokens, int64 ``[N]``, by their slots and positions."""
        blocks = self._tables[slots, positions // self._block_size].astype(np.int64)
        return blocks * self._block_size + positions % self._block_size

    def missing(self, slots: Int32, ends: Int32, max_num_tokens: int) -> TokenRange:
        """The tokens to compute of each sequence, from its first missing one on, at most a step's worth.

        The last token is always included, because its hidden state is needed. ``ends`` are the known tokens of each of
        the sequences in ``slots``, of which the first are served first.
        """
        checked = np.minimum(self._num_checked[slots], ends - 1)
        first = np.minimum(checked + self._num_computed(slots, checked, ends), ends - 1)
        first = np.minimum(first, self._num_valid[slots])
        self._num_checked[slots] = first
        up_to = np.minimum(np.cumsum(ends - first), max_num_tokens)
        num_tokens = np.diff(up_to, prepend=0)
        self._num_valid[slots[first + num_tokens > self._num_valid[slots]]] = _ALL
        return TokenRange(slots, first, num_tokens)

    def set_computed(self, places: Int64) -> None:
        """Mark entries as valid."""
        self._flat[places] = True

    @property
    def _flat(self) -> npt.NDArray[np.bool_]:
        return self._is_computed.reshape(-1)

    def _num_computed(self, slots: Int32, first: Int64, ends: Int32) -> Int64:
        """Computed tokens of each sequence between two positions, up to the first that is not."""
        positions = first[:, None] + np.arange((ends - first).max())
        is_within = positions < ends[:, None]
        columns = np.where(is_within, positions, 0)
        is_missing = ~self._flat[self.places(slots[:, None], columns)] & is_within
        return np.where(is_missing.any(axis=1), is_missing.argmax(axis=1), ends - first)


#: Steps without any draft after which prompts are no longer computed along with the target's.
_MAX_IDLE_STEPS = 16
#: Steps that wait, at most, while nobody is given drafts. On a CPU with warm caches, a step of 16 rows takes 2.4 us
#: then rather than 10 us.
_MAX_WAITING = 64


class DraftModelProposer:
    """A ``DeviceProposer``: a second model with the target's vocabulary continues each sequence, token by token.

    Its keys and values use the target's block ids, so a block reused by the prefix cache, a fork or a resumed sequence
    has both. It catches up on missing tokens before it drafts: at most ``max_num_tokens`` in a step; sequences that
    need more get useless drafts until they have caught up. While no sequence gets drafts, as in a full batch, it
    computes nothing, and catches up on many of the target's steps at once. Drafts are drawn with the target's noise and
    sampling parameters, but without penalties and biases.

    Source:
        Speculative decoding, https://arxiv.org/abs/2211.17192, with the accept rule of Gumbel coupling,
            https://arxiv.org/abs/2408.07978.
    """

    #: How many positions before its token an entry of the cache is.
    _lag = 0

    def __init__(self, model: TransformerModel, max_num_tokens: int) -> None:
        self._model = model
        self._max_num_tokens = max_num_tokens
        self._num_idle_steps = _MAX_IDLE_STEPS
        self._waiting: list[ForwardPlan] = []  # without drafts, not followed yet
        self._kv = torch.empty(0)

    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        """See ``DeviceProposer``."""
        self._state = state
        self._block_size = block_size
        model = self._model
        model.prepare()
        self._kv = torch.empty(0)  # frees the cache of a runner that did not fit, before the next is made
        model.forget_cache()
        self._kv = model.new_kv(num_blocks, block_size)
        self._cache = DraftCache(state.num_slots, state.num_columns, num_blocks, block_size)
        self._tokens = torch.zeros(num_blocks * block_size, dtype=torch.int32, device=model.device)

    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """See ``DeviceProposer``."""
        is_drafting = plan.num_drafts > 0
        if is_drafting.any():
            self._num_idle_steps = 0
        elif len(plan.sample_rows):
            self._num_idle_steps += 1
        if self._num_idle_steps >= _MAX_IDLE_STEPS:
            self._waiting.append(plan)
            if len(self._waiting) == _MAX_WAITING:
                self._follow_waiting()
            return
        self._follow_waiting()
        self._follow(plan, token_ids)
        ends = self._ends(plan)
        chosen = np.flatnonzero(is_drafting | ((np.diff(plan.q_start) - plan.num_drafts > 1) & (ends > 0)))
        if not len(chosen):
            return
        ends = np.maximum(ends[chosen], 1)
        missing = self._cache.missing(plan.slots[chosen], ends, self._max_num_tokens)
        hidden = self._compute(missing)
        is_ready = (missing.first + missing.num_tokens == ends) & is_drafting[chosen]
        if not is_ready[is_drafting[chosen]].all():
            token_ids.clamp_(min=0)
        if is_ready.any():
            last_rows = np.cumsum(missing.num_tokens)[is_ready] - 1
            self._draft(plan, token_ids, chosen[is_ready], hidden.index_select(0, self._state.upload(last_rows)))

    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        """See ``DeviceProposer``; wrong drafts are overwritten by the tokens of later plans."""

    def _ends(self, plan: ForwardPlan) -> Int32:
        """Entries of each sequence that can be computed before the step."""
        return plan.ctx_len - plan.num_drafts

    def _follow_waiting(self) -> None:
        plans, self._waiting = self._waiting, []
        if not plans:
            return
        places = np.concatenate([plan.slot_mapping for plan in plans])
        # A place may be written by several steps; the last one counts.
        places, from_end = np.unique(places[::-1], return_index=True)
        tokens = np.concatenate([plan.token_ids for plan in plans])[::-1][from_end]
        together = plans[-1]._replace(
            new_slots=np.concatenate([plan.new_slots for plan in plans]),
            table_delta=np.concatenate([plan.table_delta for plan in plans]),
            slot_mapping=places,
        )
        self._follow(together, self._state.upload(tokens))

    def _follow(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """Apply the plan's changes, and record its tokens by their places in the cache."""
        upload = self._state.upload
        self._cache.follow(plan)
        # A draft stays 0 where the draft model has not caught up with its sequence.
        self._tokens.index_put_((upload(plan.slot_mapping),), token_ids.clamp(min=0))

    def _compute(self, part: TokenRange) -> Tensor:
        num_tokens = part.num_tokens
        has_any = num_tokens > 0
        starts = np.cumsum(num_tokens) - num_tokens
        positions = np.repeat(part.first - starts, num_tokens) + np.arange(num_tokens.sum())
        places = self._cache.places(np.repeat(part.slots, num_tokens), positions)
        self._cache.set_computed(places)
        ends = (part.first + num_tokens)[has_any].astype(np.int32)
        read = self._cache.places(np.repeat(part.slots, num_tokens), positions + self._lag) if self._lag else places
        tokens = self._tokens.index_select(0, self._state.upload(read))
        q_start = np.append(starts[has_any], num_tokens.sum()).astype(np.int32)
        return self._forward(
            tokens, self._features_at(places), positions.astype(np.int32), part.slots[has_any], q_start, ends, places
        )

    def _features_at(self, places: Int64) -> Tensor | None:
        """What the model reads besides tokens."""

    def _features_of(self, hidden: Tensor) -> Tensor | None:
        """The same, from what it computed for the token before."""

    def _draft(self, plan: ForwardPlan, token_ids: Tensor, chosen: npt.NDArray[np.intp], hidden: Tensor) -> None:
        """Fill in the drafts of the sequences ``chosen``, given the hidden states of their last known tokens."""
        upload = self._state.upload
        counts, slots = plan.num_drafts[chosen], plan.slots[chosen]
        rows = plan.q_start[chosen + 1] - counts  # of the first draft
        for index in range(int(counts.max())):
            positions = plan.positions[rows] + index
            tokens = self._state.sampling(upload(slots)).sample(self._model.logits(hidden), upload(positions))
            token_ids.index_put_((upload(rows + index),), tokens)
            self._tokens.index_put_((upload(plan.slot_mapping[rows + index]),), tokens)
            left = counts > index + 1
            if not left.any():
                return
            counts, slots, rows, positions = counts[left], slots[left], rows[left], positions[left] - self._lag
            places = plan.slot_mapping[rows + (index - self._lag)]
            if not self._lag:
                self._cache.set_computed(places)
            kept = upload(np.flatnonzero(left))
            tokens, features = tokens.index_select(0, kept), self._features_of(hidden.index_select(0, kept))
            q_start = np.arange(len(slots) + 1, dtype=np.int32)
            hidden = self._forward(tokens, features, positions, slots, q_start, positions + 1, places)

    def _forward(
        self,
        tokens: Tensor,
        features: Tensor | None,
        positions: Int32,
        slots: Int32,
        q_start: Int32,
        ctx_len: Int32,
        places: Int64,
    ) -> Tensor:
        upload = self._state.upload
        max_ctx_len = int(ctx_len.max())
        return self._model.forward(
            tokens,
            upload(positions),
            self._kv,
            self._state.block_tables(upload(slots), -(-max_ctx_len // self._block_size)),
            upload(q_start),
            upload(ctx_len),
            upload(places),
            int(np.diff(q_start).max()),
            max_ctx_len,
            features=features,
        )
