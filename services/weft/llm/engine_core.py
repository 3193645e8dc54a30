"""The single-threaded part of the engine: admits requests, runs steps, emits deltas. ``EngineCore``."""

import random
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import numpy as np

from weft.base.errors import DeadlineExceededError, InternalError, InvalidArgumentError, NotFoundError, WeftError
from weft.base.observing.logs import get_logger
from weft.llm.beams import BeamSearch
from weft.llm.config import EngineConfig, TransformerConfig, kv_window
from weft.llm.kv_transfer import KvTransfers
from weft.llm.metrics import EngineMetrics
from weft.llm.models.lora import LoraBank
from weft.llm.request import HELD, RELEASED, Delta, EngineRequest, StepLogprobs
from weft.llm.runner import ModelRunner, RunnerLostError, StepTokens
from weft.llm.scheduler.blocks import BlockPool, OffloadTier
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.scheduler.scheduler import DraftSource, Scheduler, StepResult
from weft.llm.scheduler.sequence import Sequence, SequenceStatus

_LOG = get_logger("weft.llm")

_SEED_BITS = 63


class Runner(Protocol):
    """The part of ``ModelRunner`` that the engine uses."""

    num_blocks: int
    num_offload_blocks: int

    def bind_thread(self) -> None:
        """Declare the calling thread as the one that calls ``run``."""

    def run(self, plan: ForwardPlan) -> StepTokens:
        """Run a step; blocks until its tokens are known."""

    def launch(self, plan: ForwardPlan) -> Callable[[], StepTokens]:
        """Start a step, and return a function that blocks until its tokens are known."""

    def close(self) -> None:
        """Free resources outside memory; nothing runs afterwards."""


class _Launched(NamedTuple):
    """A step in flight: its plan, what awaits its tokens, when it was planned, and whether its launch raised."""

    plan: ForwardPlan
    collect: Callable[[], StepTokens]
    start_ns: int
    has_failed: bool


@dataclass(slots=True)
class _Active:
    """An admitted request: a sequence for each choice, in order, and the number of unfinished ones.

    ``search`` is that of a request with beams, whose sequences are for one token each; ``first`` computed its prompt.
    """

    sequences: list[Sequence]
    num_open: int
    search: BeamSearch | None = None
    first: Sequence | None = None


class EngineCore:
    """Active requests and the steps that advance them. Not thread-safe.

    A request that has ended owns no resources and receives nothing after its last delta.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        model_config: TransformerConfig,
        metrics: EngineMetrics,
        clock_ns: Callable[[], int],
        drafts: DraftSource | None = None,
        lora: LoraBank | None = None,
        block_key: bytes = b"",
        block_fields: Mapping[str, str] | None = None,
    ) -> None:
        self._lora = lora
        self.pool = BlockPool(
            runner.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            key=block_key or secrets.token_bytes(32),
            fields=block_fields,
            window=kv_window(config, model_config),
            tier=OffloadTier(
                runner.num_offload_blocks, config.block_size * model_config.kv_bytes_per_token(config.kv_dtype)
            ),
        )
        self.scheduler = Scheduler(config, self.pool, clock_ns=clock_ns, drafts=drafts)
        self.transfers = KvTransfers(self.pool, runner if isinstance(runner, ModelRunner) else None, self._end_lease)
        self._in_flight: deque[_Launched] = deque()
        self._end_ns = 0  # of the latest step
        self._plans_ahead = config.plans_ahead
        self._runner = runner
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._eos_token_ids = tuple(token for token in model_config.eos_token_ids if token < model_config.vocab_size)
        self._requests: dict[EngineRequest, _Active] = {}  # in order of arrival
        self._compiling: dict[EngineRequest, int] = {}  # that wait for their grammar, until when
        self._sequence_ids = count(1)
        self._seeds = random.Random(None if config.seed < 0 else config.seed)  # noqa: S311  # for sampling, not for secrets

    @property
    def has_requests(self) -> bool:
        """Whether any request is active, or a step in flight."""
        return bool(self._requests or self._in_flight)

    @property
    def num_compiling(self) -> int:
        """Requests that wait for their grammar. Any thread."""
        return len(self._compiling)

    def prepare(self, request: EngineRequest) -> None:
        """Compute block hashes and the like, in time proportional to the prompt: 5 ms for 100,000 tokens.

        Call it before ``admit``, on the submitting thread, so that no step waits for it. Thread-safe. Stops early if
        the request is cancelled.
        """
        prompt_ids, params = request.prompt_ids, request.params
        if self.pool.enable_prefix_caching:
            tokens = array("i", prompt_ids.tobytes())
            tokens.extend(request.resume_token_ids)
            request.block_hashes = self.pool.hasher.prompt(request.cache_key, tokens, lambda: request.is_cancelled)
        if params.repetition_penalty != 1.0:
            request.unique_prompt_ids = np.unique(prompt_ids)

    def acquire(self, request: EngineRequest) -> None:
        """Give a request the adapter that its parameters name. Thread-safe. Raises NotFoundError."""
        if self._lora is None:
            raise NotFoundError(
                f"adapter '{request.params.lora_name:.80}' is not loaded; the model has none: set its parameter "
                f"'lora_adapters', or 'max_loras'"
            )
        self._lora.acquire(request)

    def release(self, request: EngineRequest) -> None:
        """Take back the adapter of a request that has ended, once. Thread-safe."""
        if self._lora is not None:
            self._lora.release(request)

    def admit(self, request: EngineRequest) -> None:
        """Enqueue a validated request; if it is already cancelled, end it at once."""
        self._metrics.record_arrival(request)
        if request.is_cancelled:
            self._fail_waiting(request, None)
            return
        if request.grammar is not None and not request.grammar.is_ready:
            self._compiling[request] = self._clock_ns() + request.grammar.timeout_ns
        else:
            self._start(request)

    def resume(self, request: EngineRequest) -> None:
        """Go on with a request whose grammar is compiled, or has failed; no effect if it does not wait any more."""
        if self._compiling.pop(request, None) is not None:
            self._start(request)

    def _end_lease(self, request: EngineRequest) -> None:
        self.scheduler.retry()
        if request.hold_s:
            self._emit(Delta(request, 0, [], finish_reason=RELEASED, is_last=True))

    def _start(self, request: EngineRequest) -> None:
        if request.grammar is not None:
            if (seconds := request.grammar.take_compile_s()) is not None:
                self._metrics.grammar_compile.observe(seconds)
            if request.grammar.error is not None:
                self._fail_waiting(request, request.grammar.error)
                return
        params = request.params
        seed = self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        sequences: list[Sequence] = []
        for choice in range(1 if params.use_beam_search else params.n):
            sequences.append(
                Sequence(
                    request,
                    next(self._sequence_ids),
                    choice=choice,
                    # That of a separate request with seed ``seed + choice``, wrapped to a signed 64-bit number.
                    seed=(seed + choice + 2**63) % 2**64 - 2**63,
                    eos_token_ids=self._eos_token_ids,
                    parent=sequences[0] if choice else None,
                )
            )
        first = sequences[0]
        first.scores = None if params.prompt_logprobs is None else []
        if request.hold_s:
            first.max_len = first.num_prompt + min(params.max_tokens, 1)
        self._requests[request] = active = _Active(sequences, params.n)
        if params.use_beam_search:
            most = min(first.max_len, self.scheduler.max_len) - first.num_prompt
            active.first, active.search = first, BeamSearch(params, first.stop_ids, most)
            first.extend(())
            first.num_logprobs = active.search.num_candidates
        for sequence in sequences:
            self.scheduler.add(sequence)

    def _continue_beams(self, request: EngineRequest, active: _Active, search: BeamSearch) -> None:
        """Add a sequence for the next token of each beam; the prefix cache has its full blocks."""
        active.sequences = []
        for index, beam in enumerate(search.running):
            sequence = Sequence(request, next(self._sequence_ids), index, eos_token_ids=self._eos_token_ids)
            sequence.extend(beam.token_ids)
            sequence.num_logprobs = search.num_candidates
            active.sequences.append(sequence)
            self.scheduler.add(sequence)

    def abort(self, request: EngineRequest) -> None:
        """End a cancelled request; it receives no delta."""
        if request in self._requests:
            self._remove(request, "cancelled")
        elif request in self._compiling:
            self._fail_waiting(request, None)
        else:
            self.transfers.end(request)

    def finish(self, request: EngineRequest, choice: int) -> None:
        """Finish one choice without a delta; the request ends with its last choice."""
        active = self._requests.get(request)
        if active is None:
            return
        sequence = active.sequences[choice]
        if sequence.status is SequenceStatus.ENDED or sequence.is_cancelled:
            return
        self.scheduler.cancel(sequence)
        active.num_open -= 1
        if not active.num_open:
            self._remove(request, "stop")

    def sequences(self, request: EngineRequest) -> list[Sequence]:
        """The sequences of an active request, one for each choice; empty before it is admitted. Thread-safe."""
        active = self._requests.get(request)
        return [] if active is None else active.sequences

    def reject(self, request: EngineRequest, error: WeftError) -> None:
        """Fail a request that was not admitted. Thread-safe."""
        self.release(request)
        self._emit(_error_delta(request, error))

    def expire(self, now_ns: int) -> None:
        """Fail requests past their deadline with ``DeadlineExceededError``, and end leases past theirs."""
        self.transfers.expire(now_ns)
        for request in dict.fromkeys(sequence.request for sequence in self.scheduler.sweep(now_ns)):
            waited_ms = (now_ns - request.arrival_ns) / 1e6
            num_tokens = sum(sequence.num_output for sequence in self._requests[request].sequences)
            message = f"deadline passed after {waited_ms:.1f} ms and {num_tokens} new tokens"
            self._fail_request(request, DeadlineExceededError(message))
        for request, end_ns in list(self._compiling.items()):
            if request.deadline_ns is not None and request.deadline_ns <= now_ns:
                waited_ms = (now_ns - request.arrival_ns) / 1e6
                message = f"deadline passed after {waited_ms:.1f} ms, while the grammar was compiled"
                self._fail_waiting(request, DeadlineExceededError(message))
            elif end_ns <= now_ns and request.grammar is not None:
                self._fail_waiting(request, request.grammar.timeout_error())

    def fail_all(self, error: WeftError) -> None:
        """Fail every request with ``error``."""
        for request in list(self._requests):
            self._fail_request(request, error)
        for request in list(self._compiling):
            self._fail_waiting(request, error)
        while self.transfers.end_oldest():
            pass

    def step(self) -> None:
        """Run the next step and emit its deltas; if the step raises, its requests fail.

        With ``EngineConfig.plans_ahead`` the step after it is planned and launched before its tokens are awaited.

        Raises:
            RuntimeError: There are requests, but nothing can be scheduled: a defect.
        """
        if not self._in_flight:
            start_ns = self._clock_ns()
            plan = self.scheduler.schedule()
            while plan is None and self.transfers.end_oldest():
                plan = self.scheduler.schedule()
            if plan is None:
                raise RuntimeError(f"{len(self._requests)} requests wait and none can run")
            self._launch(plan, start_ns)
        if self._plans_ahead and self._requests:
            start_ns = self._clock_ns()
            plan = self.scheduler.schedule_ahead()
            if plan is not None:
                self._launch(plan, start_ns)
        self._collect()
        if not self._requests or (self._in_flight and self._in_flight[0].has_failed):
            self.drain()

    def drain(self) -> None:
        """Complete the steps in flight; afterwards ended requests own nothing."""
        while self._in_flight:
            self._collect()

    def _launch(self, plan: ForwardPlan, start_ns: int) -> None:
        collect: Callable[[], StepTokens] = partial(self._runner.run, plan)
        has_failed = False
        if self._plans_ahead:
            try:
                collect = self._runner.launch(plan)
            except Exception as exception:
                collect, has_failed = partial(_fail, exception), True
        self._in_flight.append(_Launched(plan, collect, start_ns, has_failed))

    def _collect(self) -> None:
        """Await the tokens of the oldest step in flight, and emit its deltas; if it raises, its requests fail."""
        launched = self._in_flight.popleft()
        start_ns = max(launched.start_ns, self._end_ns)
        try:
            tokens = launched.collect()
        except Exception as exception:
            self._in_flight.clear()  # what was planned after it is void
            self._fail_step(exception)
            if isinstance(exception, RunnerLostError):
                raise
            return
        results = self.scheduler.complete(tokens.token_ids, tokens.draft_ids, tokens.failed_loads, tokens.scores)
        if tokens.is_tier_lost:
            self.pool.tier.disable()
        end_ns = self._end_ns = self._clock_ns()
        self._metrics.record_tokens(results, end_ns)
        num_new_tokens = sum(len(result.token_ids) for result in results)
        self._metrics.record_step(launched.plan, num_new_tokens, end_ns - start_ns)
        for delta in self._deltas(results, tokens.logprobs, tokens.bad_rows):
            self._emit(delta)

    def _fail_step(self, exception: Exception) -> None:
        error: WeftError
        if isinstance(exception, RunnerLostError):
            error = exception
        else:
            error = InternalError("a step of the model failed")
            _LOG.error("a step of the model failed", extra={"error_id": error.error_id}, exc_info=exception)
        self._metrics.num_failed_steps += 1
        for request in dict.fromkeys(sequence.request for sequence in self.scheduler.fail()):
            self._fail_request(request, error)

    def _deltas(
        self, results: list[StepResult], logprobs: StepLogprobs | None, bad_rows: frozenset[int]
    ) -> list[Delta]:
        """The deltas of a step, for requests that are not cancelled; removes requests whose last choice finished."""
        deltas: list[Delta] = []
        for sequence, token_ids, row, is_finished, finish_reason in results:
            request = sequence.request
            # Its abort message may still be in the inbox, and this step may be its last; or another choice has failed.
            if request.is_cancelled or request not in self._requests:
                self.abort(request)
                continue
            is_bad = bad_rows and not bad_rows.isdisjoint(range(row, row + len(token_ids)))
            if is_bad or any(np.isnan(scores.sampled).any() for scores in sequence.scores or ()):
                self._fail_not_finite(request)
                continue
            if sequence.matcher is not None and sequence.matcher.error:
                self._metrics.num_grammar_failures += 1
                self._fail_request(request, InvalidArgumentError(sequence.matcher.error))
                continue
            active = self._requests[request]
            if active.search is not None and active.first is not None and logprobs is not None:
                if active.search.add(sequence.choice, logprobs.row(row, active.search.num_candidates)):
                    if active.search.running:
                        self._continue_beams(request, active, active.search)
                    else:
                        deltas += active.search.deltas(request, active.first.num_cached, active.first.scores)
                        self._remove(request, deltas[-1].finish_reason)
                continue
            num_cached = min(sequence.num_cached, sequence.num_prompt)
            delta = Delta(request, sequence.choice, token_ids, num_cached_tokens=num_cached)
            delta.prompt_logprobs, sequence.scores = sequence.scores, None
            if logprobs is not None and sequence.params.logprobs is not None:
                rows = range(row, row + len(token_ids))
                delta.logprobs = [logprobs.row(each, sequence.params.logprobs) for each in rows]
            if is_finished:
                delta.finish_reason = finish_reason
                active.num_open -= 1
                delta.is_last = not active.num_open
                most = min(sequence.params.max_tokens, self.scheduler.max_len - sequence.num_prompt)
                if request.hold_s and finish_reason == "length" and sequence.num_output < most:
                    delta.finish_reason, delta.is_last = HELD, False
                    self._remove(request, HELD)
                    self._emit(delta)  # before the end of its lease, which others of this step may bring about
                    hashes = sequence.hashes[: sequence.num_prompt // self.pool.block_size]
                    self.transfers.hold(request, hashes, self._clock_ns() + round(request.hold_s * 1e9))
                    continue
                if delta.is_last:
                    self._remove(request, finish_reason)
            deltas.append(delta)
        return deltas

    def _fail_not_finite(self, request: EngineRequest) -> None:
        """End a request whose logits are not finite: every token sampled from them would be wrong."""
        if request not in self._requests:  # another choice of it has failed in this step
            return
        error = InternalError("the model computed NaN or infinite logits; check its weights, or use a wider dtype")
        _LOG.error(error.message, extra={"error_id": error.error_id, "request_id": request.id})
        self._metrics.num_non_finite += 1
        self._fail_request(request, error)

    def _emit(self, delta: Delta) -> None:
        """Pass the delta to its sink; a sink that raises cancels its request."""
        request = delta.request
        if request.is_cancelled:
            return
        try:
            request.sink(delta)
        except Exception:
            _LOG.exception("the sink of request '%s' raised; the request is cancelled", request.id)
            request.is_cancelled = True
            self.abort(request)

    def _fail_request(self, request: EngineRequest, error: WeftError) -> None:
        if request in self._requests:
            self._remove(request, "cancelled" if request.is_cancelled else error.code)
            self._emit(_error_delta(request, error))

    def _fail_waiting(self, request: EngineRequest, error: WeftError | None) -> None:
        """End a request that waits for its grammar; None: it is cancelled."""
        self._compiling.pop(request, None)
        self.transfers.end(request)
        if request.grammar is not None:
            request.grammar.leave()
        self.release(request)
        self._metrics.num_grammar_failures += error is not None
        self._metrics.record_end(request, "cancelled" if error is None else error.code, self._clock_ns())
        if error is not None:
            self._emit(_error_delta(request, error))

    def _remove(self, request: EngineRequest, outcome: str) -> None:
        sequences = self._requests.pop(request).sequences
        for sequence in reversed(sequences):  # forks first: cancelling their parent would enqueue them
            self.scheduler.cancel(sequence)
        self.release(request)
        self.transfers.end(request)
        self._metrics.record_end(request, outcome, self._clock_ns())


def _fail(exception: Exception) -> StepTokens:
    raise exception


def _error_delta(request: EngineRequest, error: WeftError) -> Delta:
    return Delta(request, -1, [], error=error, is_last=True)
