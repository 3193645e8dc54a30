"""Per-slot tables on the device: sampling parameters and block tables, kept between steps."""

from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

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


class DeviceState:
    """Device tables with one row per slot, updated by a step's plan and read by its forward pass.

    A sequence keeps its row as long as it has its slot, so a step uploads only changes.

    Args:
        num_slots: Rows, besides one of padding.
        num_columns: Columns of the block table: the most blocks of one sequence.
        device: Device of the tables.

    Attributes:
        num_slots: As above.
        num_columns: As above.
        padding_slot: The row behind those of sequences: no blocks but the null block.
        tables: Block tables, int32 ``[num_slots + 1, num_columns]``.
        last_tokens: The last sampled token of a slot, int32 ``[num_slots + 1]``; 0 where none is stored.
    """

    def __init__(self, num_slots: int, num_columns: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self.num_columns = num_columns
        self._device = device
        self.padding_slot = num_slots
        self.tables = torch.zeros(num_slots + 1, num_columns, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
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
        if len(plan.table_delta):
            rows, columns, blocks = self.upload(plan.table_delta).unbind(1)
            self.tables.index_put_((rows, columns), blocks)

    def block_tables(self, slots: Tensor, num_columns: int) -> Tensor:
        """First columns of the rows ``slots``, int32 ``[B, num_columns]``; stale behind a row's last block."""
        return self.tables[:, :num_columns].index_select(0, slots)

    def sampling(self, slots: Tensor) -> SamplingRows:
        """Sampling parameters of the rows ``slots``; each column is contiguous."""
        columns = self._params.index_select(0, slots).t().contiguous()
        temperature, top_p, min_p, repetition, presence, frequency = columns.unbind(0)
        top_k, seeds = self._top_k.index_select(0, slots), self._seeds.index_select(0, slots)
        return SamplingRows(temperature, top_p, min_p, repetition, presence, frequency, top_k, seeds)
