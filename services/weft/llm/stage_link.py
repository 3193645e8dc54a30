"""What a stage of a pipeline exchanges with the others, states of tokens and what was sampled: ``StageLink``."""

from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.llm.device_state import DeviceState
from weft.llm.models.model import TransformerModel
from weft.llm.scheduler.plan import ForwardPlan, Int32


class StageLink:
    """The link of one stage; does nothing in a model that has no others. Calls are in the same order at all stages.

    Each stage receives states from the stage before and sends its own to the next. What the last samples, it sends to
    the first, which embeds it in the next step.
    """

    def __init__(self, model: TransformerModel, state: DeviceState) -> None:
        self._model = model
        self._pipeline = model.groups.pipeline
        self._state = state
        self._awaited: deque[tuple[Int32, Tensor, Any]] = deque()  # by part: slots, tokens, and what awaits these

    def receive_states(self, num_tokens: int) -> Tensor | None:
        """What the stage before has computed of the next part, ``[num_tokens, hidden_size]``; None: there is none."""
        states = self._model.new_states(num_tokens)
        return None if states is None else self._pipeline.receive(states, self._pipeline.rank - 1)

    def send_states(self, states: Tensor) -> None:
        """Send the states of a part to the next stage; they must not be changed any more."""
        self._pipeline.send(states, self._pipeline.rank + 1)

    def known_tokens(self, plan: ForwardPlan) -> Tensor:
        """The tokens of a part, ``[T]``; the first stage, which alone needs them, awaits those that are unknown."""
        upload = self._state.upload
        token_ids = upload(plan.token_ids)
        rows = np.flatnonzero(plan.token_ids < 0)  # of decodes, which come first, with one token each
        if not len(rows) or not self._model.stage.is_first:
            return token_ids
        slots = plan.slots[rows]
        while any(np.isin(each, slots).any() for each, *_ in self._awaited):
            self._receive_tokens()
        last = self._state.last_tokens.index_select(0, upload(slots))
        # Not in place: on a CPU the memory is the plan's.
        return token_ids.index_copy(0, upload(rows), last)

    def await_next(self, parts: list[Int32]) -> None:
        """After a step in which the last stage samples for the slots of ``parts``, receive all of the step before."""
        if self._model.stage.is_first:
            while self._awaited:
                self._receive_tokens()
            for slots in filter(len, parts):  # at once, since NCCL ends a process whose messages nobody takes
                tokens = torch.empty(len(slots), dtype=torch.int32, device=self._model.device)
                self._awaited.append((slots, tokens, self._pipeline.start_receive(tokens, self._pipeline.size - 1)))

    def _receive_tokens(self) -> None:
        slots, tokens, work = self._awaited.popleft()
        work.wait()
        self._state.last_tokens.index_put_((self._state.upload(slots),), tokens)

    def unite_failures(self, blocks: Int32, failed: list[int], *, is_lost: bool) -> tuple[list[int], bool]:
        """Those of ``blocks`` whose load failed, and whether the tier is lost, at any rank up to this stage."""
        groups = self._model.groups
        if all(group.size == 1 for group in groups):
            return failed, is_lost
        flags = self._state.upload(np.append(np.isin(blocks, failed), is_lost).astype(np.int32))
        for others in (groups.tensor, groups.context):
            flags = others.all_reduce(flags)
        if not self._model.stage.is_first:
            flags = flags + self._pipeline.receive(torch.empty_like(flags), self._pipeline.rank - 1)
        if not self._model.stage.is_last:
            self.send_states(flags)
        *is_failed, num_lost = flags.tolist()
        return blocks[np.array(is_failed, np.bool_)].tolist(), num_lost > 0
