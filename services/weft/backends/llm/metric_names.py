"""Metrics of language models: ours, and the same under names that others read.

Those are vLLM's, and OpenTelemetry's for generative AI.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter as get
from operator import itemgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from weft.base.observing import telemetry
from weft.base.signature import ModelSignature
from weft.base.statistics import (
    FINE_BUCKETS_S,
    GEN_AI_FIRST_TOKEN_BUCKETS_S,
    GEN_AI_REQUEST_BUCKETS_S,
    GEN_AI_TOKEN_BUCKETS_S,
    VLLM_FIRST_TOKEN_BUCKETS_S,
    VLLM_REQUEST_BUCKETS_S,
    VLLM_TOKEN_BUCKETS_S,
)
from weft.llm.metrics import Rates
from weft.llm.speculation.speculator import Speculator

PREFIX = "weft_llm_"
#: Of each convention: our name behind ``PREFIX``, theirs, and the bounds of buckets.
CONVENTIONS: Mapping[str, tuple[tuple[str, str, Sequence[float]], ...]] = {
    "vllm": (
        ("running", "vllm:num_requests_running", ()),
        ("waiting", "vllm:num_requests_waiting", ()),
        ("kv_cache_usage_ratio", "vllm:kv_cache_usage_perc", ()),
        ("prompt_tokens", "vllm:prompt_tokens", ()),
        ("prompt_tokens", "vllm:prefix_cache_queries", ()),
        ("prefix_cache_hit_tokens", "vllm:prefix_cache_hits", ()),
        ("generation_tokens", "vllm:generation_tokens", ()),
        ("preemptions", "vllm:num_preemptions", ()),
        ("requests", "vllm:request_success", ()),
        ("time_to_first_token_seconds", "vllm:time_to_first_token_seconds", VLLM_FIRST_TOKEN_BUCKETS_S),
        ("inter_token_latency_seconds", "vllm:inter_token_latency_seconds", VLLM_TOKEN_BUCKETS_S),
        # Its older name.
        ("inter_token_latency_seconds", "vllm:time_per_output_token_seconds", VLLM_TOKEN_BUCKETS_S),
        ("time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds", VLLM_TOKEN_BUCKETS_S),
        ("queue_seconds", "vllm:request_queue_time_seconds", VLLM_REQUEST_BUCKETS_S),
        ("request_seconds", "vllm:e2e_request_latency_seconds", VLLM_REQUEST_BUCKETS_S),
    ),
    "gen_ai": (
        ("request_seconds", "gen_ai_server_request_duration_seconds", GEN_AI_REQUEST_BUCKETS_S),
        ("time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds", GEN_AI_FIRST_TOKEN_BUCKETS_S),
        ("time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds", GEN_AI_TOKEN_BUCKETS_S),
    ),
}
_OTEL_ATTRIBUTES = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "weft"}
#: Names of our labels; "": it is left out.
_LABELS: Mapping[str, Mapping[str, str]] = {
    "": {"instance": ""},
    "vllm": {"model": "model_name", "instance": "engine", "outcome": "finished_reason"},
    "gen_ai": {"model": "gen_ai_request_model", "instance": ""},
}
#: More labels.
_CONSTANTS: Mapping[str, Mapping[str, str]] = {
    "gen_ai": {name.replace(".", "_"): value for name, value in _OTEL_ATTRIBUTES.items()},
}
#: vLLM's reasons by outcomes; requests with other outcomes have failed.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


def own(family: Metric, bounds: Sequence[float] = ()) -> Metric:
    """A family by our own names, which have the instance of current values alone, with these bounds of buckets."""
    return family if family.type == "gauge" else _converted(family, family.name, "", bounds)


def renamed(family: Metric, conventions: Collection[str]) -> Iterator[Metric]:
    """The families that one of ours, with all its buckets, is by these conventions."""
    for convention in conventions:
        for ours, theirs, bounds in CONVENTIONS[convention]:
            if family.name == PREFIX + ours:
                yield _converted(family, theirs, convention, bounds)


def adapter_family(model: str, num_slots: int, running: Collection[str], waiting: Collection[str]) -> Metric:
    """The gauge of adapters of vLLM, whose value is the time at which its labels were true."""
    given = {
        "model_name": model,
        "max_lora": str(num_slots),
        "running_lora_adapters": ",".join(sorted(running)),
        "waiting_lora_adapters": ",".join(sorted(waiting)),
    }
    family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters of requests that run and wait", labels=[*given])
    family.add_metric([*given.values()], time.time())
    return family


def forward(metrics: Any, model: str) -> None:
    """Let the histograms of an engine's metrics go to OpenTelemetry's too, if these are exported."""
    attributes = {**_OTEL_ATTRIBUTES, "gen_ai.request.model": model, "gen_ai.response.model": model}
    for name, histogram, bounds in (
        ("gen_ai.server.request.duration", metrics.e2e, GEN_AI_REQUEST_BUCKETS_S),
        ("gen_ai.server.time_to_first_token", metrics.ttft, GEN_AI_FIRST_TOKEN_BUCKETS_S),
        ("gen_ai.server.time_per_output_token", metrics.tpot, GEN_AI_TOKEN_BUCKETS_S),
    ):
        histogram.forward = telemetry.histogram(name, bounds, attributes)


def _converted(family: Metric, name: str, convention: str, bounds: Sequence[float]) -> Metric:
    found = Metric(name, family.documentation, family.type)
    shown = {str(bound): f"{bound:g}" if not convention else str(bound) for bound in bounds} | {"+Inf": "+Inf"}
    for sample in family.samples:
        if convention and sample.labels.get("outcome", "stop") not in _REASONS:
            continue
        if sample.labels.get("le", "+Inf") in shown:
            found.samples.append(_renamed(sample, name + sample.name.removeprefix(family.name), convention, shown))
    return found


def _renamed(sample: Sample, name: str, convention: str, shown: Mapping[str, str]) -> Sample:
    names = _LABELS[convention]
    labels = {other: value for label, value in sample.labels.items() if (other := names.get(label, label))}
    labels.update(_CONSTANTS.get(convention, {}))
    if "le" in labels:
        labels["le"] = shown[labels["le"]]
    if "finished_reason" in labels:
        labels["finished_reason"] = _REASONS[labels["finished_reason"]]
    return sample._replace(name=name, labels=labels)


#: Every fourth of the engine's buckets is exported: bounds double from one to the next.
_BUCKETS_S = FINE_BUCKETS_S[::4]
#: Minimum interval between two scrapes that rates are computed over.
_LEAST_INTERVAL_NS = 1_000_000_000


_COUNT, _LEVEL, _TIMES = CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
#: Of each family its type, its name behind ``weft_llm_``, its help, and its value of an engine; None: it has none.
_FAMILIES: tuple[tuple[Any, str, str, Callable[[Any], Any]], ...] = (
    (_TIMES, "time_to_first_token_seconds", "From arrival to the first token", get("metrics.ttft")),
    (
        *(_TIMES, "time_per_output_token_seconds", "Mean time of each token after the first, by choice"),
        get("metrics.tpot"),
    ),
    (_TIMES, "inter_token_latency_seconds", "From each token of a choice to its next", get("metrics.itl")),
    (_TIMES, "queue_seconds", "From arrival to the first slot in the engine", get("metrics.queue_time")),
    (_TIMES, "request_seconds", "From arrival to the last token", get("metrics.e2e")),
    (_COUNT, "prompt_tokens", "Prompt tokens", get("metrics.num_prompt_tokens")),
    (_COUNT, "prefix_cache_hit_tokens", "Prompt tokens found in the prefix cache", get("metrics.num_cached_tokens")),
    (
        *(_COUNT, "kv_offload_hit_tokens", "Tokens found in the second tier of the KV cache and loaded"),
        lambda e: (e.pool.tier.num_loaded - e.pool.tier.num_failed) * e.pool.block_size,
    ),
    (
        *(_COUNT, "kv_offload_saved_bytes", "Bytes saved to the second tier of the KV cache"),
        lambda e: e.pool.tier.num_saved * e.pool.tier.block_bytes,
    ),
    (
        *(_COUNT, "kv_offload_loaded_bytes", "Bytes loaded from the second tier of the KV cache"),
        lambda e: e.pool.tier.num_loaded * e.pool.tier.block_bytes,
    ),
    (
        _COUNT,
        "kv_offload_evictions",
        "Blocks that the second tier of the KV cache evicted",
        get("pool.tier.num_evicted"),
    ),
    (
        *(_COUNT, "kv_offload_failed_loads"),
        "Blocks that could not be loaded from the second tier of the KV cache, and were computed instead",
        get("pool.tier.num_failed"),
    ),
    (
        *(_COUNT, "kv_events", "Events of cached blocks, by outcome: sent or dropped"),
        lambda e: getattr(e.pool.observer, "outcomes", None),
    ),
    (_COUNT, "kv_transfers", "Fetches of blocks from other replicas, by outcome", get("metrics.transfers")),
    (_TIMES, "kv_transfer_seconds", "Time of fetches that were complete", get("metrics.transfer_time")),
    (_COUNT, "kv_transfer_bytes", "Bytes of blocks sent to other replicas and fetched", get("transfers.num_bytes")),
    (_COUNT, "kv_leases_expired", "Leases of blocks that ended at their deadline", get("transfers.num_expired")),
    (_LEVEL, "kv_leases", "Leases of blocks, for other replicas and of fetched ones", get("transfers.num_open")),
    (_COUNT, "preemptions", "Sequences preempted for others", get("num_preemptions")),
    (_COUNT, "generation_tokens", "New tokens", get("metrics.num_output_tokens")),
    (_COUNT, "computed_tokens", "Tokens that steps computed", get("metrics.num_computed_tokens")),
    (_COUNT, "steps", "Steps that ran", get("metrics.num_steps")),
    (_COUNT, "failed_steps", "Steps that failed, and their requests with them", get("metrics.num_failed_steps")),
    (_COUNT, "non_finite_logits", "Requests whose logits were NaN or infinite", get("metrics.num_non_finite")),
    (_COUNT, "good_requests", "Requests that met their latency objectives", get("metrics.num_good_requests")),
    (_TIMES, "grammar_compile_seconds", "Time to compile a grammar", get("metrics.grammar_compile")),
    (_COUNT, "grammar_failures", "Requests without a usable grammar", get("metrics.num_grammar_failures")),
    (_COUNT, "requests", "Requests that ended, by outcome", get("metrics.outcomes")),
    (_LEVEL, "running", "Sequences that run", get("num_running")),
    (_LEVEL, "waiting", "Sequences that wait in the engine for a slot or for blocks", get("num_waiting")),
    (
        *(_LEVEL, "kv_cache_usage_ratio", "Share of the KV cache's blocks that sequences own"),
        lambda e: e.pool.num_used / e.pool.capacity,
    ),
    (
        *(_LEVEL, "kv_offload_usage_ratio", "Share of the second tier of the KV cache that holds a block"),
        lambda e: e.pool.tier.num_used / e.pool.tier.num_slots if e.pool.tier.num_slots else None,
    ),
)
_OF_SPECULATION: tuple[tuple[Any, str, str, Callable[[Speculator], float]], ...] = (
    (_COUNT, "draft_tokens", "Drafts that steps computed", get("num_drafts")),
    (_COUNT, "accepted_draft_tokens", "Drafts that became output", get("num_accepted")),
    (_LEVEL, "mean_accepted_length", "New tokens per step of a sequence with drafts", get("mean_accepted_len")),
)
_RATES: tuple[tuple[Any, str, str, Callable[[Rates], float | None]], ...] = (
    (_LEVEL, "goodput_requests_per_second", "Requests that met their latency objectives", get("goodput_per_s")),
    (_LEVEL, "mfu_ratio", "Share of the device's arithmetic that steps used", get("mfu")),
    (_LEVEL, "mbu_ratio", "Share of the device's memory bandwidth that steps used", get("mbu")),
)
_ROLE = ((_LEVEL, "role", "1: the part of requests that the replica is for, prefill, decode or both", int),)
#: Of a group of ranks: how often it was started again.
_OF_GROUPS = ((_COUNT, "rank_restarts", "Times that the ranks were started again", int),)
#: Of each rank of a group: its statistics.
_OF_RANKS: tuple[tuple[Any, str, str, Callable[[dict[str, float]], float]], ...] = (
    (_COUNT, "rank_steps", "Steps that the rank ran", itemgetter("num_steps")),
    (_COUNT, "rank_step_seconds", "Time of the rank's steps", itemgetter("steps_s")),
    (_LEVEL, "rank_resident_memory_bytes", "Memory of the rank's process", itemgetter("rss_bytes")),
    (_LEVEL, "rank_kv_cache_bytes", "Size of the rank's part of the KV cache", itemgetter("kv_bytes")),
)


class EngineExport:
    """Exports the metric families of an ``Engine``, whose module imports torch; also by names of ``CONVENTIONS``.

    ``group`` is the ``GroupRunner`` of a model with ranks, which were started again ``num_restarts`` times.
    """

    def __init__(
        self,
        engine: Any,
        signature: ModelSignature,
        instance: str,
        conventions: Collection[str] = (),
        group: Any = None,
        num_restarts: int = 0,
        role: str = "both",
    ) -> None:
        self._engine = engine
        self._group = group
        self._num_restarts = num_restarts
        self._role = role
        self._conventions = conventions
        self._labels = {"model": signature.name, "version": signature.version}
        self._instance = instance
        self._totals = engine.metrics.totals(time.monotonic_ns())
        self._rates: Rates | None = None
        if "gen_ai" in conventions:
            forward(engine.metrics, signature.name)

    def read(self) -> Iterator[Metric]:
        """Every family, with current values."""
        for family in self._families(_FAMILIES, self._engine):
            yield own(family, _BUCKETS_S)
            yield from renamed(family, self._conventions)
        if "vllm" in self._conventions and self._engine.lora is not None:
            yield adapter_family(self._labels["model"], self._engine.lora.num_slots, *self._engine.adapters_in_use)
        if (speculator := self._engine.speculator) is not None:
            for family in self._families(_OF_SPECULATION, speculator, proposer=speculator.name):
                yield own(family)
        yield from self._families(_RATES, self._latest_rates())
        yield from self._families(_ROLE, 1, role=self._role)
        if self._group is None:
            return
        yield from self._families(_OF_GROUPS, self._num_restarts)
        for number, stats in enumerate(self._group.stats):
            yield from self._families(_OF_RANKS, stats, rank=str(number))

    def _families(self, rows: Any, source: Any, **more: str) -> Iterator[Metric]:
        for kind, name, text, read in rows:
            value = read(source)
            if value is None:
                continue
            labels = self._labels | {"instance": self._instance} | more
            by_outcome = {"outcome": ""} if isinstance(value, Counter) else {}
            family = kind(PREFIX + name, text, labels=[*labels, *by_outcome])
            if isinstance(value, Counter):
                for outcome, count in list(value.items()):
                    family.add_metric([*labels.values(), outcome], count)
            else:
                told = (value.cumulative(), value.sum_s) if kind is _TIMES else (value,)
                family.add_metric([*labels.values()], *told)
            yield family

    def _latest_rates(self) -> Rates:
        totals = self._engine.metrics.totals(time.monotonic_ns())
        if self._rates is None or totals.time_ns - self._totals.time_ns >= _LEAST_INTERVAL_NS:
            self._rates = self._engine.metrics.rates(self._totals, totals)
            self._totals = totals
        return self._rates
