"""Metrics that backends count themselves."""

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from weft.serving.metrics import ExportedMetrics


def _family(kind, name, **values):
    family = kind(name, "text", labels=("model",))
    for model, value in values.items():
        family.add_metric((model,), value)
    return family


def _shown(exported):
    return {
        family.name: {sample.labels["model"]: sample.value for sample in family.samples}
        for family in exported.collect()
    }


def test_families_of_all_are_shown_once():
    """With the samples of each owner, as they are when asked for."""
    exported = ExportedMetrics()
    totals = {"x": 1}
    exported.attach("1", lambda: [_family(CounterMetricFamily, "weft_a", **totals)])
    exported.attach(
        "2", lambda: [_family(CounterMetricFamily, "weft_a", y=2), _family(GaugeMetricFamily, "weft_b", y=3)]
    )
    totals["x"] = 5
    assert {"weft_a": {"x": 5, "y": 2}, "weft_b": {"y": 3}} == _shown(exported)
    exported.detach("2")
    assert {"weft_a": {"x": 5}} == _shown(exported)


def test_two_loads_of_a_model():
    """Counters add up; a gauge is that of the latest load."""
    exported = ExportedMetrics()
    for owner, value in (("old", 1), ("new", 2)):
        exported.attach(
            owner,
            lambda value=value: [
                _family(CounterMetricFamily, "weft_a", x=value),
                _family(GaugeMetricFamily, "weft_b", x=value),
            ],
        )
    assert {"weft_a": {"x": 3}, "weft_b": {"x": 2}} == _shown(exported)


def test_one_that_fails_costs_the_others_nothing():
    """What it gave before it failed is shown."""
    exported = ExportedMetrics()

    def read():
        yield _family(GaugeMetricFamily, "weft_b", x=1)
        raise RuntimeError

    exported.attach("bad", read)
    exported.attach("good", lambda: [_family(CounterMetricFamily, "weft_a", x=1)])
    assert {"weft_b": {"x": 1}, "weft_a": {"x": 1}} == _shown(exported)
