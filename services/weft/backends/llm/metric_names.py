"""The metrics of language models under the names that others read: vLLM's, and OpenTelemetry's for generative AI."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from weft.base.observing import telemetry
from weft.base.statistics import (
    GEN_AI_FIRST_TOKEN_BUCKETS_S,
    GEN_AI_REQUEST_BUCKETS_S,
    GEN_AI_TOKEN_BUCKETS_S,
    VLLM_FIRST_TOKEN_BUCKETS_S,
    VLLM_REQUEST_BUCKETS_S,
    VLLM_TOKEN_BUCKETS_S,
)

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
