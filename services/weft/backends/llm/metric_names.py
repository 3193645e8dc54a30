"""The metrics of language models under the names that others read: vLLM's, and OpenTelemetry's for generative AI."""

from collections.abc import Collection, Iterator, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

PREFIX = "weft_llm_"
#: Of each convention: names by ours behind ``PREFIX``, in pairs.
CONVENTIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "vllm": (
        ("running", "vllm:num_requests_running"),
        ("waiting", "vllm:num_requests_waiting"),
        ("kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
        ("prompt_tokens", "vllm:prompt_tokens"),
        ("prompt_tokens", "vllm:prefix_cache_queries"),
        ("prefix_cache_hit_tokens", "vllm:prefix_cache_hits"),
        ("generation_tokens", "vllm:generation_tokens"),
        ("preemptions", "vllm:num_preemptions"),
        ("requests", "vllm:request_success"),
        ("time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
        ("inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
        ("inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),  # its older name
        ("time_per_output_token_seconds", "vllm:request_time_per_output_token_seconds"),
        ("queue_seconds", "vllm:request_queue_time_seconds"),
        ("request_seconds", "vllm:e2e_request_latency_seconds"),
    ),
    "gen_ai": (
        ("request_seconds", "gen_ai_server_request_duration_seconds"),
        ("time_to_first_token_seconds", "gen_ai_server_time_to_first_token_seconds"),
        ("time_per_output_token_seconds", "gen_ai_server_time_per_output_token_seconds"),
    ),
}
#: Names of our labels.
_LABELS: Mapping[str, Mapping[str, str]] = {
    "vllm": {"model": "model_name", "instance": "engine", "outcome": "finished_reason"},
    "gen_ai": {"model": "gen_ai_request_model"},
}
#: More labels.
_CONSTANTS: Mapping[str, Mapping[str, str]] = {
    "vllm": {},
    "gen_ai": {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "weft"},
}
#: vLLM's reasons by outcomes; requests with other outcomes have failed.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}


def renamed(family: Metric, conventions: Collection[str]) -> Iterator[Metric]:
    """The families that one of ours is by these conventions."""
    for convention in conventions:
        for ours, theirs in CONVENTIONS[convention]:
            if family.name == PREFIX + ours:
                found = Metric(theirs, family.documentation, family.type)
                found.samples = [
                    _renamed(sample, theirs + sample.name.removeprefix(family.name), convention)
                    for sample in family.samples
                    if sample.labels.get("outcome", "stop") in _REASONS
                ]
                yield found


def _renamed(sample: Sample, name: str, convention: str) -> Sample:
    names = _LABELS[convention]
    labels = {names.get(label, label): value for label, value in sample.labels.items()}
    labels.update(_CONSTANTS[convention])
    if "finished_reason" in labels:
        labels["finished_reason"] = _REASONS[labels["finished_reason"]]
    return sample._replace(name=name, labels=labels)
