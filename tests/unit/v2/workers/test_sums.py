"""Metrics of several workers as one."""

import pickle

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UnknownMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar

from weft.v2.server.metrics import MetricSums


def page(count: float, *, gauge: float = 1.0, at_s: float = 0.0) -> list[Metric]:
    """What a worker counts."""
    counter = CounterMetricFamily("requests", "Requests", labels=("model",))
    counter.add_metric(("a",), count)
    unknown = UnknownMetricFamily("nv_count", "Rows")
    unknown.add_metric((), count)
    histogram = HistogramMetricFamily("latency", "Latency")
    exemplar = Exemplar({"trace_id": f"{at_s:g}"}, 0.1, at_s)
    histogram.add_metric((), [("1.0", count, exemplar), ("+Inf", 2 * count)], 0.5 * count)
    greatest = GaugeMetricFamily("degraded", "1: yes", gauge)
    summed = GaugeMetricFamily("inflight", "Requests in flight", gauge)
    memory = GaugeMetricFamily("process_resident_memory_bytes", "Bytes", gauge)
    return [counter, unknown, histogram, greatest, summed, memory]


def values(sums: MetricSums) -> dict[tuple[str, str], float]:
    """By name, and the values of the labels."""
    return {
        (sample.name, ",".join(sample.labels.values())): sample.value
        for family in sums.families()
        for sample in family.samples
    }


def test_a_page_passes_between_processes() -> None:
    """Names, texts, types, labels, values and exemplars are what they were."""
    families = page(3.0, at_s=5.0)
    passed = pickle.loads(pickle.dumps(families))
    assert [(f.name, f.documentation, f.type) for f in families] == [(f.name, f.documentation, f.type) for f in passed]
    for before, after in zip(families, passed, strict=True):
        assert [s[:3] for s in before.samples] == [s[:3] for s in after.samples]
    assert Exemplar({"trace_id": "5"}, 0.1, 5.0) == passed[2].samples[0].exemplar


def test_each_kind_is_added_as_it_should() -> None:
    """Counters, histograms and gauges are sums, some gauges the greatest value, and processes stay apart."""
    sums = MetricSums(greatest=["degraded"])
    sums.update(1, page(3.0, gauge=1.0))
    sums.update(2, page(4.0, gauge=2.0))
    assert {
        ("requests_total", "a"): 7.0,
        ("nv_count", ""): 7.0,
        ("latency_bucket", "1.0"): 7.0,
        ("latency_bucket", "+Inf"): 14.0,
        ("latency_count", ""): 14.0,
        ("latency_sum", ""): 3.5,
        ("degraded", ""): 2.0,
        ("inflight", ""): 3.0,
        ("process_resident_memory_bytes", "1"): 1.0,
        ("process_resident_memory_bytes", "2"): 2.0,
    } == values(sums)


def test_a_sum_never_falls() -> None:
    """What a worker had counted when it ended stays, what it measured goes, and its successor counts from 0."""
    sums = MetricSums()
    sums.update(1, page(3.0))
    sums.update(2, page(4.0))
    sums.end(1)
    sums.end(1)
    assert 7.0 == values(sums)["requests_total", "a"]
    assert 1.0 == values(sums)["inflight", ""]
    assert ("process_resident_memory_bytes", "1") not in values(sums)
    sums.update(1, page(2.0))
    assert 9.0 == values(sums)["requests_total", "a"]
    sums.end(1)
    assert 9.0 == values(sums)["latency_bucket", "1.0"]


def test_the_newest_exemplar_is_shown() -> None:
    """Of the exemplars of one bucket the latest is the one that a trace can still be found for."""
    sums = MetricSums()
    sums.update(1, page(1.0, at_s=9.0))
    sums.update(2, page(1.0, at_s=7.0))
    (latency,) = (family for family in sums.families() if family.name == "latency")
    assert "9" == latency.samples[0].exemplar.labels["trace_id"]
