"""Per-slot tables on the device: sampling parameters and block tables, kept between steps."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.llm import ops
from weft.llm.scheduler.plan import ForwardPlan


class SamplingRows(NamedTuple):
    """Sampling parameters of some rows, each of shape ``[S]``; float32, ``top_k`` int32, ``seeds`` int64."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    seeds: Tensor

    def sample(self, logits: Tensor, positions: Tensor) -> Tensor:
        """A token for each row at its position, int32 ``[S]``: see ``ops.sample``."""
        return ops.sample(logits, self.temperature, self.top_k, self.top_p, self.min_p, self.seeds, positions)


class DeviceState:
    """Device tables with one row per slot, updated by a step's plan and read by its forward pass.

    A sequence keeps its row as long as it has its slot, so a step uploads only changes.

    Args:
        num_slots: Rows, besides one of padding.
        num_columns: Columns of the block table: the most blocks of one sequence.

    Attributes:
        padding_slot: The row behind those of sequences: no blocks but the null block.
        tables: Block tables, int32 ``[num_slots + 1, num_columns]``.
        adapters: Slot of the adapter of a slot's sequence, int32 ``[num_slots + 1]``; -1: it has none.
        last_tokens: The last sampled token of a slot, int32 ``[num_slots + 1]``; 0 where none is stored.
    """

    def __init__(self, num_slots: int, num_columns: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.num_columns = num_columns
        self._device = device
        self.padding_slot = num_slots
        self.tables = torch.zeros(num_slots + 1, num_columns, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.adapters = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=device)
        self._host_adapters = np.full(num_slots + 1, -1, np.int32)
        self._has_adapters = False  # or has had some
        self._params = torch.zeros(num_slots, 6, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(num_slots, dtype=torch.int32, device=device)
        self._seeds = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def upload(self, array: npt.NDArray[Any]) -> Tensor:
        """The array as a tensor on the device, same dtype; on a CPU it shares memory."""
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def update(self, plan: ForwardPlan) -> None:
        """Write the parameters of newly scheduled sequences and the changed entries of block tables."""
        if len(plan.new_slots):
            slots = (self.upload(plan.new_slots),)
            self._params.index_put_(slots, self.upload(plan.new_params))
            self._top_k.index_put_(slots, self.upload(plan.new_top_k))
            self._seeds.index_put_(slots, self.upload(plan.new_seeds))
            if len(plan.new_adapters) or self._has_adapters:
                self._has_adapters = True
                adapters = plan.new_adapters if len(plan.new_adapters) else np.full_like(plan.new_slots, -1)
                self._host_adapters[plan.new_slots] = adapters
                self.adapters.index_put_(slots, self.upload(adapters))
        if len(plan.table_delta):
            rows, columns, blocks = self.upload(plan.table_delta).unbind(1)
            self.tables.index_put_((rows, columns), blocks)

    def row_adapters(self, plan: ForwardPlan) -> npt.NDArray[np.int32] | None:
        """Slot of each token's adapter, ``[T]``, -1 for none; None: no sequence of the step has one."""
        own = self._host_adapters[plan.slots] if self._has_adapters else None
        return None if own is None or own.max() < 0 else np.repeat(own, np.diff(plan.q_start))

    def block_tables(self, slots: Tensor, num_columns: int) -> Tensor:
        """First columns of the rows ``slots``, int32 ``[B, num_columns]``; stale behind a row's last block."""
        return self.tables[:, :num_columns].index_select(0, slots)

    def sampling(self, slots: Tensor) -> SamplingRows:
        """Sampling parameters of the rows ``slots``; each column is contiguous."""
        columns = self._params.index_select(0, slots).t().contiguous()
        temperature, top_p, min_p, repetition, presence, frequency = columns.unbind(0)
        top_k, seeds = self._top_k.index_select(0, slots), self._seeds.index_select(0, slots)
        return SamplingRows(temperature, top_p, min_p, repetition, presence, frequency, top_k, seeds)


class DeviceProposer(Protocol):
    """Guesses the next tokens of all sequences of a step: a draft model, or heads on hidden states.

    A plan says how many drafts each sequence gets (``ForwardPlan.num_drafts``) and has room for them: they are the last
    tokens of the sequence, with positions, cache slots in blocks that it owns, and sample rows. A draft that is unknown
    on the host has the id -1 (``UNKNOWN_TOKEN``), and ``propose`` replaces it before the target's forward pass. So
    blocks, budget and depth are settled before drafting, and no draft is wasted.

    Calls of each step, on the engine's thread under ``torch.inference_mode``: ``propose``, the target's forward pass
    and sampling, ``observe``. Both are called in every step, even without drafts, so that the proposer's own cache can
    follow the target's. A step that fails may end between the two; its sequences end with it.

    A sequence keeps its slot while it runs. It gets drafts only in steps after one that sampled a token for it in this
    slot, so what ``observe`` stored by slot is from its latest step. ``plan.new_slots`` are slots whose contents are
    void: a new, resumed or forked sequence.
    """

    def bind(self, state: DeviceState, num_blocks: int, block_size: int) -> None:
        """Prepare for a runner's tables and KV cache; called by each new runner before its first step.

        A proposer's own cache with ``num_blocks`` blocks, like the target's, can use the target's block tables and
        ``plan.slot_mapping``; then prefix cache, forks and preemption work for both, provided that every token of every
        plan gets its entry.
        """

    def propose(self, plan: ForwardPlan, token_ids: Tensor) -> None:
        """Replace each -1 in ``token_ids``, int32 ``[T]`` on the device, by a guess; leave other tokens unchanged.

        To be accepted at temperatures above 0, draw with ``ops.sample`` from the row of ``DeviceState.sampling`` at the
        position of the draft: the target draws with the same noise, keyed by seed, position and token. The drafts of
        sequence ``b`` are the last ``num_drafts[b]`` tokens of its rows.
        """

    def observe(self, plan: ForwardPlan, hidden: Tensor, num_accepted: npt.NDArray[np.int32]) -> None:
        """Receive the target's hidden states and accepted counts, after the step's tokens are sampled.

        Args:
            plan: The step, as in ``propose``.
            hidden: The target's hidden states after the final norm, ``[T, hidden_size]``. The newest token of sequence
                ``b`` was sampled from row ``q_start[b + 1] - 1 - num_drafts[b] + num_accepted[b]``.
            num_accepted: Accepted drafts of each sequence, ``[B]``; 0 in the middle of a prompt.
        """
