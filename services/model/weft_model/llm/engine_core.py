"""The part of the engine that one thread owns: requests in, steps, deltas out. ``EngineCore``."""

import random
import secrets
from collections.abc import Callable
from itertools import count
from typing import Protocol

from weft_common.errors import DeadlineExceededError, InternalError, WeftError
from weft_common.observing.logs import get_logger
from weft_model.llm.config import EngineConfig, TransformerConfig
from weft_model.llm.metrics import EngineMetrics, StepRecord
from weft_model.llm.request import Delta, EngineRequest, TokenLogprobs
from weft_model.llm.runner import StepLogprobs, StepTokens
from weft_model.llm.scheduler.blocks import BlockPool
from weft_model.llm.scheduler.plan import ForwardPlan
from weft_model.llm.scheduler.scheduler import Scheduler, StepResult
from weft_model.llm.scheduler.sequence import Sequence, SequenceStatus

_LOG = get_logger("weft.llm")

_SEED_BITS = 63


class Runner(Protocol):
    """What the engine asks of ``ModelRunner``."""

    num_blocks: int

    def bind_thread(self) -> None:
        """The calling thread is the one that calls ``run``."""

    def run(self, plan: ForwardPlan) -> StepTokens:
        """Run a step; blocks until its tokens are known."""


class EngineCore:
    """Requests that have not ended, and the steps that continue them. Knows no threads; one at a time may use it.

    A request that ends, whatever the reason, owns nothing from then on and gets nothing after its last delta.

    Args:
        runner: Runs steps.
        config: Resolved for the model.
        model_config: What ends a text.
        metrics: Is told what happens.
        clock_ns: Monotonic time in nanoseconds.

    Attributes:
        pool: Blocks of the KV cache.
        scheduler: Decides what each step computes.
        busy_since_ns: When the step under way began; 0 between steps.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        model_config: TransformerConfig,
        metrics: EngineMetrics,
        clock_ns: Callable[[], int],
    ) -> None:
        self.pool = BlockPool(
            runner.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            key=secrets.token_bytes(32),
            fields={"architecture": model_config.architecture, "kv_dtype": config.dtype},
        )
        self.scheduler = Scheduler(config, self.pool, clock_ns=clock_ns)
        self.busy_since_ns = 0
        self._runner = runner
        self._metrics = metrics
        self._clock_ns = clock_ns
        self._eos_token_ids = tuple(token for token in model_config.eos_token_ids if token < model_config.vocab_size)
        self._requests: dict[EngineRequest, None] = {}  # in the order in which they came
        self._sequence_ids = count(1)
        self._seeds = random.Random(config.seed)  # noqa: S311  # for sampling, not for secrets

    @property
    def has_requests(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._requests)

    def admit(self, request: EngineRequest) -> None:
        """The request, which was checked, waits for its turn; one that is cancelled already has ended."""
        self._metrics.request_came(request)
        if request.is_cancelled:
            self._metrics.request_ended(request, "cancelled", self._clock_ns())
            return
        params = request.params
        seed = self._seeds.getrandbits(_SEED_BITS) if params.seed is None else params.seed
        for choice in range(params.n):
            sequence = Sequence(
                request,
                next(self._sequence_ids),
                choice=choice,
                seed=seed_of_choice(seed, choice),
                eos_token_ids=self._eos_token_ids,
                parent=request.sequences[0] if choice else None,
            )
            request.sequences.append(sequence)
        self._requests[request] = None
        request.num_open = params.n
        for sequence in request.sequences:
            self.scheduler.add(sequence)

    def drop(self, request: EngineRequest) -> None:
        """The request, which is cancelled, has ended; it gets no delta."""
        if request in self._requests:
            self._forget(request, "cancelled")

    def finish(self, request: EngineRequest, choice: int) -> None:
        """The choice has what it wanted, and gets no delta; with the last one the request has ended."""
        if request not in self._requests or request.sequences[choice].status is SequenceStatus.ENDED:
            return
        self.scheduler.cancel(request.sequences[choice])
        request.num_open -= 1
        if not request.num_open:
            self._forget(request, "stop")

    def refuse(self, request: EngineRequest, error: WeftError) -> None:
        """The request, which was not admitted, has ended with ``error``. Any thread."""
        self._give(error_delta(request, error))

    def expire(self, now_ns: int) -> None:
        """Requests whose deadline has passed have ended with ``DeadlineExceededError``."""
        for sequence in self.scheduler.sweep(now_ns):
            request = sequence.request
            waited_ms = (now_ns - request.arrival_ns) / 1e6
            num_tokens = sum(sequence.num_output for sequence in request.sequences)
            message = f"deadline passed after {waited_ms:.1f} ms and {num_tokens} new tokens"
            self._end(request, DeadlineExceededError(message))

    def end_all(self, error: WeftError) -> None:
        """Every request has ended with ``error``."""
        for request in list(self._requests):
            self._end(request, error)

    def step(self) -> None:
        """The next step was run, and its deltas were given to their sinks; if it raised, its requests got an error.

        Raises:
            RuntimeError: There are requests, but nothing to compute for any of them: a defect.
        """
        start_ns = self._clock_ns()
        plan = self.scheduler.schedule()
        if plan is None:
            raise RuntimeError(f"{len(self._requests)} requests wait and none can run")
        self.busy_since_ns = start_ns
        try:
            tokens = self._runner.run(plan)
        except Exception as exception:
            self._fail(exception)
            return
        finally:
            self.busy_since_ns = 0
        # Nobody cancels a sequence between schedule and complete, so there is a result for each sampled row.
        results = self.scheduler.complete(tokens.token_ids)
        end_ns = self._clock_ns()
        self._metrics.tokens_came(results, end_ns)
        self._metrics.step_ran(plan, self._record(plan, (end_ns - start_ns) / 1e9))
        for delta in self._deltas(results, tokens.logprobs):
            self._give(delta)

    def _fail(self, exception: Exception) -> None:
        error = InternalError("a step of the model failed")
        _LOG.error("a step of the model failed", extra={"error_id": error.error_id}, exc_info=exception)
        self._metrics.num_failed_steps += 1
        for request in dict.fromkeys(sequence.request for sequence in self.scheduler.fail()):
            self._end(request, error)

    def _deltas(self, results: list[StepResult], logprobs: StepLogprobs | None) -> list[Delta]:
        """What the step gives to each request that is still wanted; requests whose last choice ended are forgotten."""
        deltas = []
        for row, (sequence, token, is_finished, finish_reason) in enumerate(results):
            request = sequence.request
            if request.is_cancelled:  # the message that drops it may come too late: it may have nothing left to run
                self.drop(request)
                continue
            delta = Delta(request, sequence.choice, [token], num_cached_tokens=sequence.num_cached)
            if logprobs is not None and sequence.params.logprobs is not None:
                delta.logprobs = [token_logprobs(logprobs, row, sequence.params.logprobs)]
            if is_finished:
                delta.finish_reason = finish_reason
                request.num_open -= 1
                delta.is_last = not request.num_open
                if delta.is_last:
                    self._forget(request, finish_reason)
            deltas.append(delta)
        return deltas

    def _give(self, delta: Delta) -> None:
        """The sink has the delta; if it raises, its request has ended."""
        request = delta.request
        if request.is_cancelled:
            return
        try:
            request.sink(delta)
        except Exception:
            _LOG.exception("the sink of request '%s' raised; the request is cancelled", request.id)
            request.is_cancelled = True
            self.drop(request)

    def _end(self, request: EngineRequest, error: WeftError) -> None:
        """The request has ended with an error, which its sink gets."""
        if request in self._requests:
            self._forget(request, "cancelled" if request.is_cancelled else error.code)
            self._give(error_delta(request, error))

    def _forget(self, request: EngineRequest, outcome: str) -> None:
        """Nothing of the request is left in the scheduler."""
        del self._requests[request]
        for sequence in reversed(request.sequences):  # forks before their parent, which would make them wait
            self.scheduler.cancel(sequence)
        self._metrics.request_ended(request, outcome, self._clock_ns())
        request.sequences.clear()  # they refer to it in turn: long prompts would stay until the garbage is collected

    def _record(self, plan: ForwardPlan, duration_s: float) -> StepRecord:
        scheduler, pool = self.scheduler, self.pool
        return StepRecord(
            duration_s=duration_s,
            num_sequences=len(plan.slots),
            num_tokens=len(plan.token_ids),
            num_sampled=len(plan.sample_rows),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_used_blocks=pool.num_used,
            num_blocks=pool.capacity,
        )


def error_delta(request: EngineRequest, error: WeftError) -> Delta:
    """The last delta of a request that ends with an error."""
    return Delta(request, -1, [], error=error, is_last=True)


def seed_of_choice(seed: int, choice: int) -> int:
    """Seed of a choice of a request: that of a request of its own with the seed ``seed + choice``, signed 64-bit."""
    return (seed + choice + 2**63) % 2**64 - 2**63


def token_logprobs(logprobs: StepLogprobs, row: int, num_top: int) -> TokenLogprobs:
    """What a request that asked for ``num_top`` is told of the token in ``row``."""
    top_ids, top = logprobs.top_ids[row, :num_top], logprobs.top[row, :num_top]
    return TokenLogprobs(float(logprobs.sampled[row]), tuple(top_ids.tolist()), tuple(top.tolist()))
