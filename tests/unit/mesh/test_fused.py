"""The command line of a router that has services in its process, and their metrics as one."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from weft.mesh.fused import ServiceCollector, main


@pytest.mark.parametrize(
    ("services", "text"),
    [
        ([], "the following arguments are required: --in-process"),
        (["router --repository ."], "'router --repository .' must begin with one of preprocess, model, postprocess"),
        ([""], "'' must begin with one of"),
        (["model"], "the following arguments are required: --repository"),
        (["model --repository 'half"], "No closing quotation"),
        (["model --repository /nowhere"], "--repository /nowhere: there is no such folder"),
        (["model --repository . --grpc-port 1"], "unrecognized arguments: --grpc-port 1"),
        (["model --repository . --load-model m"], "--load-model needs --model-control-mode explicit"),
        (["model --repository .", "model --repository ."], "--target: each name may be given once, got model, model"),
    ],
)
def test_wrong_usage_is_told_and_nothing_starts(
    services: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 2 and the reason, before a port is opened."""
    monkeypatch.chdir(tmp_path)
    arguments = [argument for service in services for argument in ("--in-process", service)]
    try:
        status: object = main(["--repository", ".", *arguments])
    except SystemExit as end:
        status = end.code
    assert 2 == status
    assert text in capsys.readouterr().err


class _OnDemand(Collector):
    """A gauge and a counter, as each service with models on demand has them."""

    def __init__(self, num_warm: int) -> None:
        self._num_warm = num_warm

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("warm", "Loaded", value=self._num_warm)
        unloads = CounterMetricFamily("unloads", "Unloaded", labels=("model",))
        unloads.add_metric(("m",), 2)
        yield unloads


def test_metrics_of_two_services_do_not_collide() -> None:
    """Each family is there once, and each sample says of which service it is."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector({"preprocess": [_OnDemand(1)], "model": [_OnDemand(3)], "postprocess": []}))
    assert ["warm", "unloads"] == [metric.name for metric in registry.collect()]
    assert 3 == registry.get_sample_value("warm", {"service": "model"})
    assert 2 == registry.get_sample_value("unloads_total", {"service": "preprocess", "model": "m"})
