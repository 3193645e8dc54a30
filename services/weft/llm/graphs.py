"""Decode steps as CUDA graphs: static inputs, capture, replay. ``DecodeGraphs``."""

import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, TypeVar

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
    """Shape of a captured step: number of sequences, padding included, and tokens of each."""

    num_seqs: int
    q_len: int


class GraphPolicy:
    """Shapes to capture, and the choice of a shape for a step.

    A step is uniform if all its sequences have the same number of tokens, one of ``q_lens``: 1 for decodes, 1 plus the
    drafts for decodes with speculation. A uniform step runs in the smallest shape that holds it, padded. Other steps,
    such as those with a chunk of a prompt, are launched operation by operation.

    Attributes:
        shapes: Shapes to capture, the largest first: smaller ones then fit into its memory.
    """

    def __init__(self, max_num_seqs: int, q_lens: tuple[int, ...]) -> None:
        largest = bisect_left(BATCH_SIZES, max_num_seqs)
        self._sizes = BATCH_SIZES[: largest + 1]
        self._q_lens = frozenset(q_lens)
        shapes = [GraphShape(num_seqs, q_len) for num_seqs in self._sizes for q_len in self._q_lens]
        self.shapes = sorted(shapes, key=lambda shape: (shape.num_seqs * shape.q_len, shape), reverse=True)

    def choose(self, num_seqs: int, num_tokens: int, max_q_len: int) -> GraphShape | None:
        """The shape for a step; None: it is not uniform, or has more sequences than any shape."""
        if max_q_len not in self._q_lens or num_tokens != num_seqs * max_q_len or num_seqs > self._sizes[-1]:
            return None
        return GraphShape(self._sizes[bisect_left(self._sizes, num_seqs)], max_q_len)


#: Captures work that has the same operations, shapes and addresses each time, and runs it more than once. Returns a
#: function that repeats it, and its result, which each call overwrites.
Recorder = Callable[[Callable[[], Tensor]], tuple[Callable[[], None], Tensor]]


class CudaRecorder:
    """CUDA graphs that share a memory pool: only one may be running, and the next overwrites its results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See ``Recorder``; ``work`` runs twice before, so that nothing is compiled during the capture."""
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
    """Call ``build`` with ``num_blocks`` blocks, or up to 30 % fewer until they fit.

    Args:
        num_blocks: Blocks of the first attempt.
        build: Makes cache and graphs for a number of blocks.
        out_of_memory: Raised by ``build`` if they do not fit.
        release: Called after a failed attempt, with nothing of it alive: returns memory to the device.

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
    """A captured step; ``lengths`` and ``token_ids`` are written before a replay, which computes ``hidden`` anew.

    Attributes:
        lengths: Slots and context lengths of its sequences, int32 ``[2, B]``.
        token_ids: int32 ``[T]``. -1: padding.
        hidden: ``[T, hidden_size]``.
        incoming: Of the stage before, ``[T, hidden_size]``, written before a replay; None: it is the first stage.
    """

    lengths: Tensor
    token_ids: Tensor
    replay: Callable[[], None]
    hidden: Tensor
    incoming: Tensor | None


class DecodeGraphs:
    """Forward passes of uniform steps, captured once and replayed.

    Positions, cache slots and rows of block tables are computed on the device from ``DeviceState``, so that a step
    uploads only two numbers per sequence and its tokens. Padding uses the slot behind the last, whose blocks are all
    the null block. ``kv`` must be at its final address.
    """

    def __init__(
        self,
        model: TransformerModel,
        kv: Tensor,
        state: DeviceState,
        policy: GraphPolicy,
        record: Recorder,
        *,
        block_size: int,
        max_model_len: int,
        only_largest: bool,
    ) -> None:
        self._model = model
        self._kv = kv
        self._state = state
        self._policy = policy
        self._block_size = block_size
        self._max_model_len = max_model_len
        with torch.inference_mode():
            shapes = policy.shapes[: 1 if only_largest else None]
            # Steps without an adapter have graphs of their own, which cost nothing more.
            kinds = (False,) if model.lora is None else (False, True)
            self._graphs = {(each, kind): self._captured(each, record, kind) for each in shapes for kind in kinds}

    def run(
        self, plan: ForwardPlan, token_ids: Tensor, incoming: Tensor | None = None, *, has_adapters: bool = False
    ) -> Tensor | None:
        """Hidden states of the plan's tokens, ``[T, hidden_size]``, valid until the next call; None: no graph fits.

        The tables must be up to date with the plan; ``token_ids`` are its tokens on the device, int32 ``[T]``.
        """
        shape = self._policy.choose(len(plan.slots), len(plan.token_ids), plan.max_q_len)
        graph = None if shape is None else self._graphs.get((shape, has_adapters))
        if shape is None or graph is None:
            return None
        lengths = np.empty((2, shape.num_seqs), np.int32)
        lengths[:, : len(plan.slots)] = plan.slots, plan.ctx_len
        lengths[:, len(plan.slots) :] = [[self._state.padding_slot], [shape.q_len]]
        graph.lengths.copy_(self._state.upload(lengths), non_blocking=True)
        graph.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        graph.token_ids[len(token_ids) :].fill_(-1)
        if graph.incoming is not None and incoming is not None:
            graph.incoming[: len(incoming)].copy_(incoming, non_blocking=True)
        graph.replay()
        return graph.hidden[: len(token_ids)]

    def _captured(self, shape: GraphShape, record: Recorder, has_adapters: bool) -> _Graph:
        num_tokens = shape.num_seqs * shape.q_len
        device = self._kv.device
        lengths = torch.empty(2, shape.num_seqs, dtype=torch.int32, device=device)
        lengths[0], lengths[1] = self._state.padding_slot, shape.q_len
        token_ids = torch.full((num_tokens,), -1, dtype=torch.int32, device=device)
        q_start = torch.arange(0, num_tokens + 1, shape.q_len, dtype=torch.int32, device=device)
        slots, ctx_len = lengths.unbind(0)
        incoming = self._model.new_states(num_tokens)
        state, tables = self._state, self._state.tables

        def step() -> Tensor:
            inputs = (token_ids, q_start, ctx_len, slots, state.last_tokens, tables)
            known, positions, slot_mapping = ops.step_inputs(*inputs, block_size=self._block_size)
            rows = state.block_tables(slots, tables.shape[1])
            adapters = None
            if has_adapters:
                adapters = state.adapters.index_select(0, slots).repeat_interleave(shape.q_len)
            return self._model.forward(
                known, positions, self._kv, rows, q_start, ctx_len, slot_mapping, shape.q_len, self._max_model_len,
                adapters, incoming=incoming,
            )  # fmt: skip

        return _Graph(lengths, token_ids, *record(step), incoming)
