"""Engine metrics: latencies, rates, occupancy, goodput, hardware utilisation.

The engine's thread writes; any thread may read, and may see values from the middle of a step.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.base.statistics import FINE_BUCKETS_S, LatencyHistogram
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.models.model_config import DTYPE_BYTES
from weft.llm.request import EngineRequest
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.scheduler.scheduler import StepResult
from weft.llm.scheduler.sequence import Sequence

#: Outcomes of requests that completed.
ANSWERED = ("stop", "length")


@dataclass(slots=True, frozen=True)
class StepMetrics:
    """One completed step.

    Attributes:
        duration_s: From the plan to its sampled tokens.
        num_sequences: Sequences in the step.
        num_tokens: Tokens whose keys and values it computed.
        num_sampled: New tokens.
        num_running: Sequences with a slot after the step.
        num_waiting: Sequences without one.
        num_preemptions: Preemptions since the engine started.
        num_used_blocks: Blocks of the KV cache that sequences own.
        num_blocks: Blocks of the KV cache without the null block.
    """

    duration_s: float
    num_sequences: int
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_used_blocks: int
    num_blocks: int


@dataclass(slots=True, frozen=True)
class RequestMetrics:
    """One ended request.

    Attributes:
        outcome: ``"stop"`` or ``"length"`` (that of its last choice), ``"cancelled"``, or the code of its error.
        queue_s: From arrival to its first slot; None if it never had one.
        ttft_s: Time to first token, from arrival; None if there was none.
        tpot_s: Time per output token after the first, mean of the slowest choice; None without a second token.
        e2e_s: From arrival to end.
        num_prompt_tokens: Length of its prompt.
        num_output_tokens: New tokens of all choices.
        is_good: It completed within its latency objectives.
    """

    outcome: str
    queue_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    is_good: bool


class EngineObserver:
    """Callbacks on the engine's thread; they must be quick and must not raise.

    This base class ignores all events; subclass it and override what is of interest.
    """

    def on_first_token(self, queue_s: float, ttft_s: float) -> None:
        """A request has its first token, ``queue_s`` and ``ttft_s`` after arrival it got a slot and this token."""

    def on_inter_token(self, seconds: float, count: int) -> None:
        """``count`` choices received a token, each ``seconds`` after its previous one."""

    def on_request(self, record: RequestMetrics) -> None:
        """A request ended."""

    def on_step(self, record: StepMetrics) -> None:
        """A step completed."""


class _Choice:
    """Times of a choice's first and last token, and its number of tokens."""

    __slots__ = ("first_ns", "last_ns", "num_tokens")

    def __init__(self) -> None:
        self.first_ns = self.last_ns = self.num_tokens = 0

    @property
    def tpot_ns(self) -> float:
        """Mean time per token after the first; 0 without a second one."""
        return (self.last_ns - self.first_ns) / (self.num_tokens - 1) if self.num_tokens > 1 else 0.0


class _Timeline:
    """Token times of one active request."""

    __slots__ = ("choices", "first_ns")

    def __init__(self, num_choices: int) -> None:
        self.first_ns = 0
        self.choices = [_Choice() for _ in range(num_choices)]


class Totals(NamedTuple):
    """Cumulative totals of an engine at one time; the difference of two gives rates.

    Attributes:
        time_ns: When they were read, by the engine's clock.
        num_output_tokens: New tokens.
        num_good_requests: Requests that completed within their latency objectives.
        busy_ns: Time spent in steps.
        num_flops: Minimum arithmetic of the steps, see ``TransformerConfig.flops``; 0 if no peak is configured.
        num_bytes: Minimum memory traffic of the steps in bytes; 0 if no peak is configured.
    """

    time_ns: int
    num_output_tokens: int
    num_good_requests: int
    busy_ns: int
    num_flops: int
    num_bytes: int


class Rates(NamedTuple):
    """Rates between two ``Totals``.

    Attributes:
        tokens_per_s: New tokens per second.
        goodput_per_s: Requests per second that completed within their latency objectives.
        mfu: Model FLOPs utilisation while steps ran, 0 to 1; None if the peak is unknown.
        mbu: Memory bandwidth utilisation while steps ran, 0 to 1; None if the peak is unknown.
    """

    tokens_per_s: float
    goodput_per_s: float
    mfu: float | None
    mbu: float | None


class EngineMetrics:
    """Totals, histograms and rates of one engine.

    Args:
        config: The engine's; provides default latency objectives and peak rates.
        model_config: The model's shape, from which arithmetic and memory traffic are computed.
        observer: Receives every event as well.
        weight_bytes: Of all matrices of products as they are in memory; None: as numbers of ``config.dtype``.

    Attributes:
        queue_time: From arrival to the first slot, of requests with at least one token.
        ttft: Time to first token, from arrival.
        itl: Inter-token latency: between successive tokens of a choice.
        tpot: Time per output token: mean of a choice's ``itl``.
        e2e: From arrival to end.
        outcomes: Ended requests by outcome; see ``RequestMetrics``.
        num_good_requests: Requests that completed within their latency objectives.
        num_prompt_tokens: Prompt tokens of requests with at least one token.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_computed_tokens: Tokens whose keys and values were computed; recomputation after a preemption counts again.
        num_output_tokens: New tokens.
        num_steps: Completed steps.
        num_failed_steps: Steps that raised.
        num_non_finite: Requests that failed because their logits were NaN or infinite.
        busy_ns: Time spent in steps.
        last_step: The last completed step; None before the first.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: TransformerConfig,
        *,
        observer: EngineObserver | None = None,
        weight_bytes: int | None = None,
    ) -> None:
        self._config = config
        self._observer = observer or EngineObserver()
        self._model = model_config
        if weight_bytes is None:
            weight_bytes = (model_config.num_multiplied + model_config.num_head) * DTYPE_BYTES[config.dtype]
        self._weight_bytes = weight_bytes
        self._timelines: dict[EngineRequest, _Timeline] = {}
        self._num_flops = self._num_bytes = 0
        self.queue_time, self.ttft, self.itl, self.tpot, self.e2e = (LatencyHistogram(FINE_BUCKETS_S) for _ in range(5))
        self.outcomes: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_computed_tokens = self.num_output_tokens = 0
        self.num_good_requests = self.num_steps = self.num_failed_steps = self.num_non_finite = self.busy_ns = 0
        self.last_step: StepMetrics | None = None

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache; 0 before the first token."""
        return self.num_cached_tokens / max(self.num_prompt_tokens, 1)

    def totals(self, now_ns: int) -> Totals:
        """Totals until now, for ``rates``. Any thread."""
        return Totals(
            now_ns, self.num_output_tokens, self.num_good_requests, self.busy_ns, self._num_flops, self._num_bytes
        )

    def rates(self, before: Totals, after: Totals) -> Rates:
        """Rates between two ``totals``. Any thread."""
        elapsed_s = max(after.time_ns - before.time_ns, 1) / 1e9
        busy_s = max(after.busy_ns - before.busy_ns, 1) / 1e9
        peak_flops_per_s, peak_bytes_per_s = self._config.peak_flops_per_s, self._config.peak_bytes_per_s
        return Rates(
            tokens_per_s=(after.num_output_tokens - before.num_output_tokens) / elapsed_s,
            goodput_per_s=(after.num_good_requests - before.num_good_requests) / elapsed_s,
            mfu=(after.num_flops - before.num_flops) / busy_s / peak_flops_per_s if peak_flops_per_s else None,
            mbu=(after.num_bytes - before.num_bytes) / busy_s / peak_bytes_per_s if peak_bytes_per_s else None,
        )

    def record_arrival(self, request: EngineRequest) -> None:
        """Record a new request; its ``arrival_ns`` is set."""
        self._timelines[request] = _Timeline(request.params.n)

    def record_tokens(self, results: Iterable[StepResult], now_ns: int) -> None:
        """Record the new tokens of each result. Tokens of one step share the time since the last one equally."""
        previous: dict[tuple[int, int], int] = {}
        for result in results:
            sequence = result.seq
            request = sequence.request
            timeline = self._timelines[request]
            choice = timeline.choices[sequence.choice]
            num_new = len(result.token_ids)
            if choice.num_tokens:
                key = (choice.last_ns, num_new)
                previous[key] = previous.get(key, 0) + num_new
            else:
                choice.first_ns = now_ns
                if not timeline.first_ns:
                    self._record_first_token(sequence, timeline, now_ns)
            choice.num_tokens += num_new
            choice.last_ns = now_ns
        # Few distinct keys: most choices had their last token in the same step.
        for (last_ns, num_new), count in previous.items():
            seconds = (now_ns - last_ns) / 1e9 / num_new
            self.itl.observe(seconds, count=count)
            self._observer.on_inter_token(seconds, count)

    def record_end(self, request: EngineRequest, outcome: str, now_ns: int, first_scheduled_ns: int = 0) -> None:
        """Record the end of a request, which had its first slot at ``first_scheduled_ns``; 0: it never had one."""
        timeline = self._timelines.pop(request)
        record = self._record(request, timeline, outcome, now_ns, first_scheduled_ns)
        self.outcomes[outcome] += 1
        self.num_good_requests += record.is_good
        self.e2e.observe(record.e2e_s)
        for choice in timeline.choices:
            if choice.num_tokens > 1:
                self.tpot.observe(choice.tpot_ns / 1e9)
        self._observer.on_request(record)

    def record_step(self, plan: ForwardPlan, record: StepMetrics) -> None:
        """Record a completed step."""
        self.num_steps += 1
        self.num_computed_tokens += record.num_tokens
        self.num_output_tokens += record.num_sampled
        self.busy_ns += round(record.duration_s * 1e9)
        self.last_step = record
        if self._config.peak_flops_per_s or self._config.peak_bytes_per_s:
            num_new, context = np.diff(plan.q_start).astype(np.int64), plan.ctx_len.astype(np.int64)
            self._num_flops += self._model.flops(num_new, context, len(plan.sample_rows))
            kv_bytes = self._model.read_kv_bytes(num_new, context, self._config.kv_dtype)
            self._num_bytes += self._weight_bytes + kv_bytes
        self._observer.on_step(record)

    def _record_first_token(self, sequence: Sequence, timeline: _Timeline, now_ns: int) -> None:
        timeline.first_ns = now_ns
        self.num_prompt_tokens += sequence.num_prompt
        self.num_cached_tokens += sequence.num_cached
        arrival_ns = sequence.request.arrival_ns
        queue_s = (sequence.first_scheduled_ns - arrival_ns) / 1e9
        ttft_s = (now_ns - arrival_ns) / 1e9
        self.queue_time.observe(queue_s)
        self.ttft.observe(ttft_s)
        self._observer.on_first_token(queue_s, ttft_s)

    def _record(
        self, request: EngineRequest, timeline: _Timeline, outcome: str, now_ns: int, first_scheduled_ns: int
    ) -> RequestMetrics:
        arrival_ns = request.arrival_ns
        ttft_s = (timeline.first_ns - arrival_ns) / 1e9 if timeline.first_ns else None
        tpot_s = max(choice.tpot_ns for choice in timeline.choices) / 1e9
        slo_ttft_ms = request.slo_ttft_ms or self._config.slo_ttft_ms
        slo_tpot_ms = request.slo_tpot_ms or self._config.slo_tpot_ms
        return RequestMetrics(
            outcome=outcome,
            queue_s=(first_scheduled_ns - arrival_ns) / 1e9 if first_scheduled_ns else None,
            ttft_s=ttft_s,
            tpot_s=tpot_s or None,
            e2e_s=(now_ns - arrival_ns) / 1e9,
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=sum(choice.num_tokens for choice in timeline.choices),
            is_good=outcome in ANSWERED
            and (not slo_ttft_ms or (ttft_s or 0.0) * 1e3 <= slo_ttft_ms)
            and (not slo_tpot_ms or tpot_s * 1e3 <= slo_tpot_ms),
        )
