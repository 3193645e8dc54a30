"""Engine metrics: latencies, rates, goodput, hardware utilisation.

The engine's thread writes; any thread may read, and may see values from the middle of a step.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.base.statistics import FINE_BUCKETS_S, GENERATION_BUCKETS_S, LatencyHistogram
from weft.llm.config import EngineConfig, TransformerConfig
from weft.llm.models.fields import DTYPE_BYTES
from weft.llm.request import EngineRequest
from weft.llm.scheduler.plan import ForwardPlan
from weft.llm.scheduler.scheduler import StepResult

#: Outcomes of requests that completed.
_ANSWERED = ("stop", "length")


@dataclass(slots=True)
class _Choice:
    """Times of a choice's first and last token, and its number of tokens."""

    first_ns: int = 0
    last_ns: int = 0
    num_tokens: int = 0

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 without a second one."""
        return (self.last_ns - self.first_ns) / (self.num_tokens - 1) / 1e9 if self.num_tokens > 1 else 0.0


@dataclass(slots=True)
class _Timeline:
    """Token times of one active request; ``first_ns``: of the first token of any choice, 0 before."""

    choices: list[_Choice]
    first_ns: int = 0


class Totals(NamedTuple):
    """Cumulative totals of an engine at ``time_ns`` by its clock; the difference of two gives rates.

    ``num_flops`` and ``num_bytes`` are the minimum arithmetic and memory traffic of the steps; 0 if no peak is
    configured.
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
        weight_bytes: Of all matrices of products as they are in memory; None: as numbers of ``config.dtype``.

    Attributes:
        queue_time: From arrival to the first slot, of requests with at least one token.
        ttft: Time to first token, from arrival.
        itl: Inter-token latency: between successive tokens of a choice.
        tpot: Time per output token: mean of a choice's ``itl``.
        outcomes: Ended requests by outcome: ``"stop"`` or ``"length"`` (that of the last choice), ``"cancelled"``, or
            the code of the error.
        num_prompt_tokens: Prompt tokens of requests with at least one token.
        num_computed_tokens: Tokens whose keys and values were computed; recomputation after a preemption counts again.
        num_non_finite: Requests that failed because their logits were NaN or infinite.
        transfers: Fetches of blocks from other engines: ``"complete"``, ``"failed"``, or ``"late"``, past their time.
        transfer_time: From the question to the last block, of those that are complete.
    """

    def __init__(
        self, config: EngineConfig, model_config: TransformerConfig, *, weight_bytes: int | None = None
    ) -> None:
        self._config = config
        self._model = model_config
        if weight_bytes is None:
            weight_bytes = round(model_config.num_read(math.inf) + model_config.num_head) * DTYPE_BYTES[config.dtype]
        self._weight_bytes = weight_bytes
        self._timelines: dict[EngineRequest, _Timeline] = {}
        self._num_flops = self._num_bytes = 0
        self.queue_time, self.ttft, self.itl, self.tpot, self.e2e = (
            LatencyHistogram(GENERATION_BUCKETS_S) for _ in range(5)
        )
        self.grammar_compile = LatencyHistogram(FINE_BUCKETS_S)
        self.outcomes: Counter[str] = Counter()
        self.num_prompt_tokens = self.num_cached_tokens = self.num_computed_tokens = self.num_output_tokens = 0
        self.num_good_requests = self.num_steps = self.num_failed_steps = self.num_non_finite = self.busy_ns = 0
        self.num_grammar_failures = 0
        self.transfers: Counter[str] = Counter()
        self.transfer_time = LatencyHistogram(FINE_BUCKETS_S)

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
        self._timelines[request] = _Timeline([_Choice() for _ in range(request.params.n)])

    def record_tokens(self, results: Iterable[StepResult], now_ns: int) -> None:
        """Record the new tokens of each result. Tokens of one step share the time since the last one equally."""
        previous: dict[tuple[int, int], int] = {}
        for result in results:
            sequence = result.seq
            timeline = self._timelines[sequence.request]
            choice = timeline.choices[sequence.choice]
            num_new = len(result.token_ids)
            if choice.num_tokens:
                key = (choice.last_ns, num_new)
                previous[key] = previous.get(key, 0) + num_new
            else:
                choice.first_ns = now_ns
                if not timeline.first_ns:
                    timeline.first_ns = now_ns
                    arrival_ns = sequence.request.arrival_ns
                    self.num_prompt_tokens += sequence.num_prompt
                    self.num_cached_tokens += min(sequence.num_cached, sequence.num_prompt)
                    self.queue_time.observe((sequence.first_scheduled_ns - arrival_ns) / 1e9)
                    self.ttft.observe((now_ns - arrival_ns) / 1e9)
            choice.num_tokens += num_new
            choice.last_ns = now_ns
        # Few distinct keys: most choices had their last token in the same step.
        for (last_ns, num_new), count in previous.items():
            self.itl.observe((now_ns - last_ns) / 1e9 / num_new, count=count)

    def record_end(self, request: EngineRequest, outcome: str, now_ns: int) -> None:
        """Record the end of a request."""
        timeline = self._timelines.pop(request)
        self.outcomes[outcome] += 1
        self.e2e.observe((now_ns - request.arrival_ns) / 1e9)
        for choice in timeline.choices:
            if choice.num_tokens > 1:
                self.tpot.observe(choice.tpot_s)
        if outcome in _ANSWERED:
            ttft_s = max(timeline.first_ns - request.arrival_ns, 0) / 1e9
            tpot_s = max(choice.tpot_s for choice in timeline.choices)
            slo_ttft_ms = request.slo_ttft_ms or self._config.slo_ttft_ms
            slo_tpot_ms = request.slo_tpot_ms or self._config.slo_tpot_ms
            keeps_ttft = not slo_ttft_ms or ttft_s * 1e3 <= slo_ttft_ms
            self.num_good_requests += keeps_ttft and (not slo_tpot_ms or tpot_s * 1e3 <= slo_tpot_ms)

    def record_step(self, plan: ForwardPlan, num_new_tokens: int, duration_ns: int) -> None:
        """Record a completed step, from its plan to its sampled tokens."""
        self.num_steps += 1
        self.num_computed_tokens += len(plan.token_ids)
        self.num_output_tokens += num_new_tokens
        self.busy_ns += duration_ns
        if self._config.peak_flops_per_s or self._config.peak_bytes_per_s:
            num_new, context = np.diff(plan.q_start).astype(np.int64), plan.ctx_len.astype(np.int64)
            self._num_flops += self._model.flops(num_new, context, len(plan.sample_rows))
            kv_bytes = self._model.read_kv_bytes(num_new, context, self._config.kv_dtype)
            self._num_bytes += round(self._weight_bytes * self._model.read_share(len(plan.token_ids))) + kv_bytes
