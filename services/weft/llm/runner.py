"""Executes a planned step on the device: block copies, forward pass, sampling. Knows tensors, not requests."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.base.errors import UnavailableError
from weft.base.processes.malloc import set_kept_bytes
from weft.llm import ops
from weft.llm.block_store import open_store, write_blocks
from weft.llm.config import EngineConfig
from weft.llm.device_state import DeviceProposer, DeviceState
from weft.llm.graphs import DecodeGraphs, GraphPolicy, Recorder
from weft.llm.models.model import TransformerModel
from weft.llm.parallel import context
from weft.llm.request import StepLogprobs
from weft.llm.scheduler.micro_batches import MicroBatch, split
from weft.llm.scheduler.plan import BlockTransfers, ForwardPlan, accepted_counts, count_drafts, draft_rows
from weft.llm.stage_link import StageLink


class HostCopy:
    """An asynchronous copy of tensors to the host; do not change the tensors until ``wait`` returns.

    On a GPU it uses pinned memory and a stream of its own that waits for the current one, so that later work neither
    waits nor is waited for. On a CPU, where ``stream`` is None, nothing is copied.
    """

    def __init__(self, stream: "torch.cuda.Stream | None", *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._sources = tensors  # kept alive until they are copied
        self._tensors = tensors
        if stream is None:
            return
        self._tensors = tuple(torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for x in tensors)
        self._event = torch.cuda.Event()
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for target, source in zip(self._tensors, tensors, strict=True):
                target.copy_(source, non_blocking=True)
            self._event.record(stream)

    def wait(self) -> list[npt.NDArray[Any]]:
        """Block until the copies are complete; return them as arrays."""
        if self._event is not None:
            self._event.synchronize()
        self._sources = ()
        return [x.numpy() for x in self._tensors]


_KEPT_BYTES = 256 << 20


def retain_freed_memory() -> bool:
    """Let the process keep up to 256 MiB of freed memory, so that the next step reuses it without page faults.

    By default glibc returns large freed buffers to the system, and every step allocates the same ones again: attention
    of 12 sequences of 560 tokens over 4 layers (8 heads of 32) takes 7 to 8 ms of CPU in place of 9 to 11 (2 cores of
    an AMD EPYC, 1 thread). Returns whether the C library supports the setting (glibc does).
    """
    return set_kept_bytes(_KEPT_BYTES)


#: Types of a KV cache of codes, by ``EngineConfig.kv_dtype``.
_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


#: Most logits of a prompt's tokens that exist at once: 64 MiB.
_MAX_SCORE_LOGITS = 1 << 24

#: Least tokens of a part of a step whose next step waits for it: with fewer, parts cost more than they gain.
_MIN_PART_TOKENS = {"cpu": 16, "cuda": 128}


class StepTokens(NamedTuple):
    """The sampled tokens of a step.

    Attributes:
        token_ids: One per sample row of the plan, int32 ``[S]``.
        logprobs: None if no row requested them.
        draft_ids: The drafts of the plan in order, including those filled in by a device proposer; None: the plan had
            none of these.
        failed_loads: Blocks whose load from the second tier failed; their contents are invalid.
        is_tier_lost: The second tier has failed.
        bad_rows: Sample rows whose logits hold NaN, or infinity as their maximum; their tokens are meaningless.
        scores: Of the plan's score rows; None: it has none.
    """

    token_ids: npt.NDArray[np.int32]
    logprobs: StepLogprobs | None
    draft_ids: npt.NDArray[np.int32] | None = None
    failed_loads: Collection[int] = ()
    is_tier_lost: bool = False
    bad_rows: frozenset[int] = frozenset()
    scores: StepLogprobs | None = None


class RunnerLostError(UnavailableError):
    """The runner cannot run any more steps, so that its engine ends. UNAVAILABLE."""


class ModelRunner:
    """Owns the KV cache and the device tables. Not thread-safe.

    Of a model that is a stage of a pipeline, the runner of every stage is given the same plans. Only that of the last
    returns tokens. One that raises leaves the pipeline out of step: none of its runners can be used any more.

    Args:
        config: Resolved: ``dtype``, ``max_model_len`` and ``num_blocks`` are set.
        num_blocks: Blocks of the KV cache, including the null block; None: those of ``config``.
        proposer: Fills in the drafts that plans leave unknown; None: there are none.

    Raises:
        InvalidArgumentError: The second tier cannot be created as configured.
        ResourceExhaustedError: The host lacks memory or disk for the cache or the second tier.

    Attributes:
        num_offload_blocks: Blocks of the second tier; 0: there is none.
        kv: The cache, ``[num_blocks, num_layers, ...]`` (``weft_kernels.blocks.layout``), zero-initialised, so that no
            block holds NaN.
    """

    def __init__(
        self,
        model: TransformerModel,
        config: EngineConfig,
        num_blocks: int | None = None,
        *,
        proposer: DeviceProposer | None = None,
    ) -> None:
        self._model = model
        self._proposer = proposer
        self.num_blocks = config.num_blocks if num_blocks is None else num_blocks
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._num_threads = config.num_threads
        self._plans_ahead = config.plans_ahead
        self._graphs: DecodeGraphs | None = None
        self._masks = torch.empty(0, 0, dtype=torch.int32)  # kept, on the host
        dtype = _CODES.get(config.kv_dtype, model.dtype)
        self.kv = model.new_kv(self.num_blocks, config.block_size, dtype)
        model.prepare(dtype)
        self.block_bytes = self.kv[0].numel() * self.kv.itemsize
        self._store = open_store(config, self.kv)
        self.num_offload_blocks = 0 if self._store is None else self._store.num_slots
        num_columns = -(-config.max_model_len // config.block_size)
        self._state = DeviceState(config.max_num_seqs, num_columns, model.device)
        self._link = StageLink(model, self._state)
        self._copy_stream = torch.cuda.Stream(model.device) if self.kv.is_cuda else None
        model.taps = ()
        if proposer is not None:
            proposer.bind(self._state, self.num_blocks, config.block_size)

    def bind_thread(self) -> None:
        """Prepare the calling thread for ``run``: select the device and set ``config.num_threads`` torch threads."""
        torch.set_num_threads(self._num_threads)
        if self.kv.is_cuda:
            torch.cuda.set_device(self.kv.device)
        else:
            retain_freed_memory()

    def capture(self, policy: GraphPolicy, record: Recorder, *, only_largest: bool = False) -> None:
        """Capture the steps of ``policy``, to be replayed as graphs; call it before the first step.

        ``only_largest``: to measure the memory that it takes.
        """
        self._graphs = DecodeGraphs(
            self._model,
            self.kv,
            self._state,
            policy,
            record,
            block_size=self._block_size,
            max_model_len=self._max_model_len,
            only_largest=only_largest,
        )

    def warm_up(self) -> None:
        """On a CPU, compute a token of the null block, so that nothing is compiled during the first request.

        Takes seconds, less if compiled code is cached on disk.
        """
        if self.kv.is_cuda:
            return
        none = torch.zeros(1, dtype=torch.int32)
        one = torch.ones(1, dtype=torch.int32)
        slots = torch.zeros(1, dtype=torch.int64)
        incoming = self._model.new_states(1)
        hidden = self._model.forward(
            none, none, self.kv, none.view(1, 1), torch.cat((none, one)), one, slots, 1, 1, incoming=incoming
        )
        if self._model.stage.is_last:
            self._model.logits(hidden)

    def run(self, plan: ForwardPlan) -> StepTokens:
        """Compute keys and values of the plan's tokens, and sample one token per sample row.

        Blocks until the tokens are on the host. Even if it raises, it changes only blocks that the plan writes.
        """
        if plan.transfers is None or self._store is None:
            return self._run(plan)
        failed = self._store.run(self.kv, plan.transfers)
        failed_loads, is_lost = self._link.unite_failures(
            plan.transfers.loads[:, 1], failed, is_lost=self._store.is_lost
        )
        return self._run(plan)._replace(failed_loads=failed_loads, is_tier_lost=is_lost)

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """Start a step whose plan may leave the tokens of the step before unknown (-1).

        On a GPU it returns once the work is queued; steps run in the order of their launches.

        Returns:
            A function that blocks until the tokens are on the host.
        """
        if self._proposer is not None or self._store is not None:
            tokens = self.run(plan)  # such plans follow the step before, and its tokens
            return lambda: tokens
        with torch.inference_mode():
            self._state.update(plan)
            return self._compute(plan)

    def write_blocks(self, blocks: Sequence[int], rows: npt.NDArray[np.uint8], saves: BlockTransfers | None) -> None:
        """Save to the second tier, then set the contents of blocks, ``[len(blocks), block_bytes]``; between steps."""
        if saves is not None and self._store is not None:
            self._store.run(self.kv, saves)
        write_blocks(self.kv, blocks, rows)

    def close(self) -> None:
        """Free the file of the second tier; the cache is freed with the runner. Nothing may run afterwards."""
        self._model.forget_cache()
        if self._store is not None:
            self._store.close()

    def _run(self, plan: ForwardPlan) -> StepTokens:
        with torch.inference_mode():
            self._state.update(plan)
            if self._proposer is not None:
                return self._run_with(self._proposer, plan, self._state.upload(plan.token_ids))
            return self._compute(plan)()

    def _compute(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """Compute a step, in parts if there are stages; returns a function that blocks until its tokens are here.

        While a stage computes a part, the stage before computes the next one: of the same step, or the first of the
        next step, whose tokens are known by then.
        """
        stage, link, pipeline = self._model.stage, self._link, self._model.groups.pipeline
        parts = [MicroBatch(plan)] if pipeline.size == 1 else split(plan, self._num_parts(plan))
        results = []
        for part, *_ in parts:
            hidden = self._forward(part, link.known_tokens(part))
            if not stage.is_last:
                link.send_states(hidden if self._graphs is None else hidden.clone())  # a graph overwrites its result
                continue
            sampled = self._sample_rows(hidden, part)
            results.append((sampled, self._score_rows(hidden, part)))
            if self._plans_ahead and sampled and not stage.is_first:
                pipeline.send(sampled[0], 0)
        if self._plans_ahead and pipeline.size > 1:
            link.await_next([part.plan.sample_slots for part in parts])
        if not stage.is_last:
            return lambda: StepTokens(np.empty(0, np.int32), None)
        _, *rows = zip(*parts, strict=True)
        return self._finish(*map(self._in_order, zip(*results, strict=True), rows))

    def _num_parts(self, plan: ForwardPlan) -> int:
        has_next = self._plans_ahead and plan.grammar is None and not len(plan.penalty_tokens)
        least = 1 if has_next else _MIN_PART_TOKENS[self.kv.device.type]
        return max(min(self._model.groups.pipeline.size, len(plan.token_ids) // least), 1)

    def _in_order(self, parts: Sequence[tuple[Tensor, ...]], rows: Sequence[npt.NDArray[Any]]) -> tuple[Tensor, ...]:
        """Results of parts, with the rows of the step that they are of, as one of the step."""
        if len(parts) == 1:
            return parts[0]
        order = self._state.upload(np.argsort(np.concatenate(rows)))
        return tuple(torch.cat(each).index_select(0, order) for each in zip(*filter(None, parts), strict=True))

    def _run_with(self, proposer: DeviceProposer, plan: ForwardPlan, token_ids: Tensor) -> StepTokens:
        proposer.propose(plan, token_ids)
        # Ranks may have chosen different products of the draft model, which differ in the last digits.
        groups = self._model.groups
        token_ids = groups.context.broadcast(groups.tensor.broadcast(token_ids))
        rows = draft_rows(plan)
        draft_ids = token_ids[self._state.upload(rows)].cpu().numpy() if len(rows) else np.empty(0, np.int32)
        if len(rows) and len(plan.penalty_tokens):
            plan = count_drafts(plan, draft_ids)
        hidden = self._forward(plan, token_ids)
        result = self._finish(self._sample_rows(hidden, plan, draft_ids), self._score_rows(hidden, plan))()
        proposer.observe(plan, hidden, accepted_counts(plan, draft_ids, result.token_ids))
        return result._replace(draft_ids=draft_ids)

    def _forward(self, plan: ForwardPlan, token_ids: Tensor) -> Tensor:
        """Hidden states of the plan's tokens, ``[T, hidden_size]``, valid until the next call.

        What the stage before has computed is received; the result is what the next one is to be sent.
        """
        adapters = self._state.row_adapters(plan)
        upload, share, group = self._state.upload, None, self._model.groups.context
        if group.size > 1 and len(plan.token_ids) >= context.MIN_TOKENS[self.kv.device.type] * group.size:
            wanted = np.union1d(plan.sample_rows, plan.score_rows)
            if self._proposer is not None:
                wanted = np.arange(len(plan.token_ids), dtype=np.int32)
            inputs = plan.q_start, plan.ctx_len, plan.slot_mapping
            share = context.ContextShare(group, *inputs, wanted, self._block_size, upload)
            rows, sequences, q_start, ctx_len = share.part
            plan = plan._replace(
                slots=plan.slots[sequences],
                q_start=q_start,
                ctx_len=ctx_len,
                positions=plan.positions[rows],
                slot_mapping=plan.slot_mapping[rows],
                max_q_len=int(np.diff(q_start).max()),
            )
            token_ids = token_ids.index_select(0, upload(rows))
            adapters = None if adapters is None else adapters[rows]
        incoming = self._link.receive_states(len(token_ids))
        if share is None and self._graphs is not None:
            hidden = self._graphs.run(plan, token_ids, incoming, has_adapters=adapters is not None)
            if hidden is not None:
                return hidden
        return self._model.forward(
            token_ids,
            upload(plan.positions),
            self.kv,
            self._state.block_tables(upload(plan.slots), -(-plan.max_ctx_len // self._block_size)),
            upload(plan.q_start),
            upload(plan.ctx_len),
            upload(plan.slot_mapping),
            plan.max_q_len,
            plan.max_ctx_len,
            None if adapters is None else upload(adapters),
            incoming=incoming,
            share=share,
        )

    def _finish(self, sampled: tuple[Tensor, ...], scored: tuple[Tensor, ...]) -> Callable[[], StepTokens]:
        """Start to copy the results to the host; returns a function that blocks until they are there."""
        copies = (HostCopy(self._copy_stream, *each) if each else None for each in (sampled, scored))
        return partial(_on_host, *copies)

    def _score_rows(self, hidden: Tensor, plan: ForwardPlan) -> tuple[Tensor, ...]:
        """Log probabilities at the score rows, a few rows of logits at a time, as ``StepLogprobs``; (): no rows."""
        if not len(plan.score_rows):
            return ()
        num_rows = max(_MAX_SCORE_LOGITS // self._model.config.vocab_size, 1)
        rows, token_ids = (self._state.upload(each).split(num_rows) for each in (plan.score_rows, plan.score_token_ids))
        parts = [
            _logprobs(self._model.logits(hidden.index_select(0, some)), its, plan.num_score_logprobs)
            for some, its in zip(rows, token_ids, strict=True)
        ]
        return tuple(map(torch.cat, zip(*parts, strict=True)))

    def _sample_rows(
        self, hidden: Tensor, plan: ForwardPlan, draft_ids: npt.NDArray[np.int32] | None = None
    ) -> tuple[Tensor, ...]:
        """Sample one token per sample row: tokens, which rows are bad, and log probabilities if any; (): no rows."""
        if not len(plan.sample_rows):
            return ()
        upload = self._state.upload
        if len(plan.sample_rows) != len(hidden):
            hidden = hidden.index_select(0, upload(plan.sample_rows))
        logits = self._model.logits(hidden)
        rows = self._state.sampling(upload(plan.sample_slots))
        is_bad = ~logits.amax(1).isfinite()  # amax passes NaN on; 9 us for a row of 32,000, 63 for 32 rows
        num_top = int(plan.num_logprobs.max())
        is_changed = len(plan.penalty_tokens) > 0 or plan.grammar is not None
        before = logits.clone() if num_top >= 0 and is_changed else logits
        if len(plan.penalty_tokens):
            ops.apply_penalties(
                logits,
                upload(plan.penalty_start),
                upload(plan.penalty_tokens),
                upload(plan.penalty_counts),
                upload(plan.penalty_bias),
                rows.repetition,
                rows.presence,
                rows.frequency,
            )
        if plan.grammar is not None:  # on a GPU, while it computes the logits
            num_rows = len(plan.grammar.rows)
            has_parts = self._model.groups.pipeline.size > 1  # of which the next would overwrite the masks
            if num_rows > len(self._masks) or has_parts:
                num_words = -(-logits.shape[1] // 32)
                self._masks = torch.empty(num_rows, num_words, dtype=torch.int32, pin_memory=self.kv.is_cuda)
            masks = self._masks[:num_rows]
            plan.grammar.fill(masks.numpy(), draft_ids)
            ops.apply_masks(logits, upload(plan.grammar.rows), masks.to(logits.device, non_blocking=True))
        token_ids = rows.sample(logits, upload(plan.sample_positions))
        logprobs = _logprobs(before, token_ids, num_top) if num_top >= 0 else ()
        if self._plans_ahead:
            token_ids = self._model.groups.context.broadcast(token_ids)  # whole steps differ likewise
            self._state.last_tokens.index_put_((upload(plan.sample_slots),), token_ids)
        return token_ids, is_bad, *logprobs


def _on_host(copy: HostCopy | None, scores: HostCopy | None) -> StepTokens:
    """The sampled tokens and the scores, once they have arrived."""
    scored = None if scores is None else StepLogprobs(*scores.wait())
    if copy is None:
        return StepTokens(np.empty(0, np.int32), None, scores=scored)
    tokens, is_bad, *logprobs = copy.wait()
    bad_rows = frozenset(np.flatnonzero(is_bad).tolist()) if is_bad.any() else frozenset()
    return StepTokens(tokens, StepLogprobs(*logprobs) if logprobs else None, bad_rows=bad_rows, scores=scored)


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of ``StepLogprobs``, with the ``num_top`` most likely tokens; ``logits``: float32 ``[S, V]``."""
    sampled = logits.gather(1, token_ids.to(torch.int64).unsqueeze(1)).squeeze(1) - logits.logsumexp(1)
    if num_top:
        top, top_ids = ops.softmax_topk(logits, num_top, log=True)
    else:
        top, top_ids = logits.new_empty(len(logits), 0), token_ids.new_empty(len(logits), 0)
    return sampled, top_ids, top
