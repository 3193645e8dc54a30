"""Metrics by the names of others."""

from types import SimpleNamespace
from typing import Any

import pytest

from weft.backends.llm.metric_names import adapter_family, forward
from weft.base.observing import telemetry
from weft.base.statistics import GEN_AI_REQUEST_BUCKETS_S, GENERATION_BUCKETS_S, LatencyHistogram


def metrics_of_an_engine() -> Any:
    return SimpleNamespace(**{name: LatencyHistogram(GENERATION_BUCKETS_S) for name in ("e2e", "ttft", "tpot")})


def test_histograms_are_exported_to_an_otlp_endpoint(otlp_collector: Any) -> None:
    """Under the convention's names, with its attributes, unit and bounds, at the latest when the process ends."""
    telemetry.configure("weft.test")
    metrics = metrics_of_an_engine()
    forward(metrics, "writer")
    metrics.e2e.observe(0.03)
    metrics.ttft.observe(0.002)
    telemetry.shutdown()
    found = {metric.name: metric for metric in otlp_collector.metrics}
    assert {"gen_ai.server.request.duration", "gen_ai.server.time_to_first_token"} == found.keys()
    duration = found["gen_ai.server.request.duration"]
    (point,) = duration.histogram.data_points
    assert ("s", [*GEN_AI_REQUEST_BUCKETS_S], 1, 0.03) == (
        duration.unit,
        [*point.explicit_bounds],
        point.count,
        point.sum,
    )
    attributes = {pair.key: pair.value.string_value for pair in point.attributes}
    assert attributes == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "weft",
        "gen_ai.request.model": "writer",
        "gen_ai.response.model": "writer",
    }


@pytest.mark.parametrize("name", ["OTEL_SDK_DISABLED", "OTEL_METRICS_EXPORTER", ""])
def test_without_an_endpoint_nothing_is_forwarded(
    monkeypatch: pytest.MonkeyPatch, otlp_collector: Any, name: str
) -> None:
    """Nor where the environment turns it off."""
    if name:
        monkeypatch.setenv(name, "true" if name.endswith("DISABLED") else "none")
    else:
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    metrics = metrics_of_an_engine()
    forward(metrics, "writer")
    metrics.e2e.observe(0.03)
    assert [None] * 3 == [metrics.e2e.forward, metrics.ttft.forward, metrics.tpot.forward]
    telemetry.shutdown()
    assert [] == otlp_collector.metrics


def test_adapters_are_labels() -> None:
    """By name, with a comma between them."""
    (sample,) = adapter_family("base", 2, {"b", "a"}, set()).samples
    assert sample.labels == {
        "model_name": "base",
        "max_lora": "2",
        "running_lora_adapters": "a,b",
        "waiting_lora_adapters": "",
    }
