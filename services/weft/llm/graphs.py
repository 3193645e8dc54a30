"""Decode steps as graphs: static inputs, capture, replay. ``DecodeGraphs``."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from weft.base.errors import InvalidArgumentError
from weft.llm import ops
from weft.llm.device_state import DeviceState
from weft.llm.models.model import TransformerModel
from weft.llm.scheduler.plan import ForwardPlan

#: Sequences of a captured step: few sizes, and little padding in any of them.
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class GraphShape(NamedTuple):
    """Shape of a captured step.

    Attributes:
        num_seqs: Sequences, those of padding included.
        q_len: Tokens of each.
    """

    num_seqs: int
    q_len: int


class GraphPolicy:
    """Shapes to capture, and the shape in which a step runs.

    A step is uniform if all its sequences have equally many tokens, and that number is one of ``q_lens``: 1 for
    decodes, 1 and the drafts for decodes with speculation. A uniform step runs in the smallest shape that holds it, the
    rest padded. All others, such as those with a chunk of a prompt, are launched operation by operation.

    Args:
        max_num_seqs: Most sequences of a step.
        q_lens: Tokens of a sequence in a uniform step.

    Attributes:
        shapes: What to capture, the largest first: smaller ones then fit into its memory.
    """

    def __init__(self, max_num_seqs: int, q_lens: tuple[int, ...]) -> None:
        largest = bisect_left(BATCH_SIZES, max_num_seqs)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._q_lens = frozenset(q_lens)
        shapes = [GraphShape(num_seqs, q_len) for num_seqs in self._sizes for q_len in self._q_lens]
        self.shapes = sorted(shapes, key=lambda shape: (shape.num_seqs * shape.q_len, shape), reverse=True)

    def choose(self, num_seqs: int, num_tokens: int, max_q_len: int) -> GraphShape | None:
        """The shape for a step; None: it is not uniform, or has more sequences than any shape.

        Args:
            num_seqs: Sequences of the step, at least 1.
            num_tokens: Tokens of all of them.
            max_q_len: Most tokens of one.
        """
        if max_q_len not in self._q_lens or num_tokens != num_seqs * max_q_len or num_seqs > self._sizes[-1]:
            return None
        return GraphShape(self._sizes[bisect_left(self._sizes, num_seqs)], max_q_len)


class GraphRecorder(Protocol):
    """Captures work once, to be repeated on the same tensors."""

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture ``work``.

        Args:
            work: Launches operations whose number, shapes and addresses are the same each time; runs more than once.

        Returns:
            A function that repeats it, and its result, which each call overwrites.
        """


class CudaRecorder:
    """CUDA graphs that share one pool of memory: only one of them may be running, and the next overwrites its results.

    Args:
        device: A CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``GraphRecorder``; ``work`` runs twice before, so that nothing is compiled while it is captured."""
        with torch.cuda.device(self._device), torch.inference_mode():
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(2):
                    work()
            torch.cuda.current_stream().wait_stream(self._stream)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                result = work()

        def replay(_inputs: object = work) -> None:  # a graph reads what ``work`` reads by address: it has to stay
            graph.replay()

        return replay, result


_log = logging.getLogger("weft.model.llm")
_T = TypeVar("_T")

_SHRINK = 0.95
_MAX_ATTEMPTS = 8


def build_shrinking(
    num_blocks: int, build: Callable[[int], _T], *, out_of_memory: type[Exception], release: Callable[[], None]
) -> _T:
    """What ``build`` makes with ``num_blocks`` blocks, or with as few percent less as fit, at most 30.

    Args:
        num_blocks: Blocks of the first attempt.
        build: Makes cache and graphs with so many blocks.
        out_of_memory: What it raises where they do not fit.
        release: Called after a failed attempt, with nothing of it alive: gives memory back to the device.

    Raises:
        InvalidArgumentError: Even the smallest did not fit.
    """
    wanted = num_blocks
    for _ in range(_MAX_ATTEMPTS):
        try:
            return build(num_blocks)
        except out_of_memory:
            pass  # the exception keeps what was built alive until here
        release()
        num_blocks = max(2, int(num_blocks * _SHRINK))
        _log.warning("KV cache and CUDA graphs did not fit into memory; the cache has %d blocks now", num_blocks)
    raise InvalidArgumentError(
        f"engine: a KV cache of {wanted} blocks, and of {_MAX_ATTEMPTS - 1} times 5 % less, does not fit into memory "
        "beside CUDA graphs; lower num_blocks or kv_cache_bytes, or set enable_cuda_graphs to false"
    )


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
