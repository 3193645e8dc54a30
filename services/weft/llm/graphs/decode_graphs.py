"""Decode steps as graphs: static inputs, capture, replay. ``DecodeGraphs``."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.llm import ops
from weft.llm.device_state import DeviceState
from weft.llm.graphs.policy import GraphPolicy, GraphShape
from weft.llm.graphs.recorder import GraphRecorder
from weft.llm.models.model import TransformerModel
from weft.llm.scheduler.plan import ForwardPlan


class _Graph(NamedTuple):
    """A captured step.

    Attributes:
        lengths: Slots and context lengths of its sequences, int32 ``[2, B]``; written before a replay.
        token_ids: int32 ``[T]``; written before a replay. -1: padding.
        replay: Computes ``hidden`` anew.
        hidden: Hidden states, ``[T, hidden_size]``.
    """

    lengths: Tensor
    token_ids: Tensor
    replay: Callable[[], None]
    hidden: Tensor


class DecodeGraphs:
    """Forward passes of uniform steps, captured once and then repeated.

    Positions, cache slots and rows of block tables are computed on the device from ``DeviceState``, so that a step
    uploads two numbers a sequence and its tokens. A sequence of padding is in the slot behind the last: its blocks are
    all the null block, which it writes.

    Args:
        model: The model.
        kv: The cache, at its final address.
        state: Tables by slot, whose last row is that of padding.
        policy: What to capture.
        recorder: Captures.
        block_size: Tokens of a block.
        max_model_len: Most tokens of a sequence.
    """

    def __init__(
        self,
        model: TransformerModel,
        kv: Tensor,
        state: DeviceState,
        policy: GraphPolicy,
        recorder: GraphRecorder,
        *,
        block_size: int,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._kv = kv
        self._state = state
        self._policy = policy
        self._recorder = recorder
        self._block_size = block_size
        self._max_model_len = max_model_len
        self._graphs: dict[GraphShape, _Graph] = {}

    def capture(self, *, only_largest: bool = False) -> None:
        """Capture every shape of the policy, the largest first; ``only_largest``: to see how much memory it takes."""
        with torch.inference_mode():
            for shape in self._policy.shapes[: 1 if only_largest else None]:
                self._graphs[shape] = self._captured(shape)

    def run(self, plan: ForwardPlan, token_ids: Tensor) -> Tensor | None:
        """Hidden states of the plan's tokens, ``[T, hidden_size]``, valid until the next call; None: no graph fits.

        Args:
            plan: The step; the tables are up to date with it.
            token_ids: Its tokens on the device, int32 ``[T]``.
        """
        shape = self._policy.choose(len(plan.slots), len(plan.token_ids), plan.max_q_len)
        graph = None if shape is None else self._graphs.get(shape)
        if shape is None or graph is None:
            return None
        lengths = np.empty((2, shape.num_seqs), np.int32)
        lengths[:, : len(plan.slots)] = plan.slots, plan.ctx_len
        lengths[:, len(plan.slots) :] = [[self._state.padding_slot], [shape.q_len]]
        graph.lengths.copy_(self._state.upload(lengths), non_blocking=True)
        graph.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        graph.token_ids[len(token_ids) :].fill_(-1)
        graph.replay()
        return graph.hidden[: len(token_ids)]

    def _captured(self, shape: GraphShape) -> _Graph:
        num_tokens = shape.num_seqs * shape.q_len
        device = self._kv.device
        lengths = torch.empty(2, shape.num_seqs, dtype=torch.int32, device=device)
        lengths[0], lengths[1] = self._state.padding_slot, shape.q_len
        token_ids = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
        q_start = torch.arange(0, num_tokens + 1, shape.q_len, dtype=torch.int32, device=device)
        slots, ctx_len = lengths.unbind(0)
        state, tables = self._state, self._state.tables

        def step() -> Tensor:
            inputs = (token_ids, q_start, ctx_len, slots, state.last_tokens, tables)
            known, positions, slot_mapping = ops.step_inputs(*inputs, block_size=self._block_size)
            rows = state.block_tables(slots, tables.shape[1])
            return self._model.forward(
                known, positions, self._kv, rows, q_start, ctx_len, slot_mapping, shape.q_len, self._max_model_len
            )

        return _Graph(lengths, token_ids, *self._recorder.record(step))
