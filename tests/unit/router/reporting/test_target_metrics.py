"""What Prometheus is told of targets that are not there, and of graphs that cannot be loaded."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget, failing
from tests.unit.router.reporting.test_replica_metrics import two_replicas

from weft.base.core import CallContext
from weft.base.errors import UnavailableError, WeftError
from weft.router.core import RouterCore
from weft.router.metrics import TargetCollector
from weft.router.targets.catalog import TargetCatalog
from weft.router.targets.replicas import Health

UNAVAILABLE = "weft_target_unavailable_total"
SERVING = "weft_target_serving_replicas"


def sampled(core: RouterCore) -> Callable[..., float | None]:
    """Gives a sample of the router's metrics as they are now."""
    registry = CollectorRegistry()
    for collector in core.extension().collectors:
        registry.register(collector)
    return lambda name, **labels: registry.get_sample_value(name, labels)


async def call(core: RouterCore, name: str) -> str:
    """The status of a request."""
    try:
        await core.infer(make.request(name), CallContext())
    except WeftError as error:
        return error.code
    return "OK"


async def test_a_router_that_starts_without_a_target_counts_what_would_wake_it(
    tmp_path: Path, target: FakeTarget
) -> None:
    """Requests for a graph that is not loaded and for a model that is not known; it serves both once the target is."""
    models, target.models = target.models, UnavailableError("the name has no address")
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        sample = sampled(s.core)
        assert (0, 0) == (sample(UNAVAILABLE, target="model"), sample(SERVING, target="model"))
        assert "OK" not in [await call(s.core, "pipe"), await call(s.core, "double")]
        assert 2 == sample(UNAVAILABLE, target="model")
        assert 0 == sample("weft_graph_load_failed", graph="pipe", version="1")
        target.models = models
        await s.refresh(lambda: s.core.is_model_ready("pipe", ""))
        assert ["OK", "OK"] == [await call(s.core, "pipe"), await call(s.core, "double")]
        assert 1 == sample(SERVING, target="model")


async def test_calls_by_name_and_of_steps_that_find_nobody_are_counted(tmp_path: Path, target: FakeTarget) -> None:
    """Those that end UNAVAILABLE at the target; any other status is no reason to start more of it."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target) as s:
        sample = sampled(s.core)
        assert 0 == sample(
            "weft_graph_step_requests_total", graph="pipe", version="1", step="root/one", status="UNAVAILABLE"
        )
        target.answers["double"] = failing("UNAVAILABLE")
        assert ["UNAVAILABLE"] * 2 == [await call(s.core, "pipe"), await call(s.core, "double")]
        assert 2 == sample(UNAVAILABLE, target="model")
        target.answers["double"] = failing("INTERNAL")
        assert ["INTERNAL", "NOT_FOUND"] == [await call(s.core, "double"), await call(s.core, "nobody")]
        assert 2 == sample(UNAVAILABLE, target="model")


@pytest.mark.parametrize(
    ("files", "version"),
    [({"1/graph.pbtxt": "name: 'bad'  no graph"}, "1"), ({"01/graph.pbtxt": make.PIPE}, "")],
    ids=["a file with a mistake", "a folder that is left out"],
)
async def test_a_graph_that_is_broken_from_the_start_shows(
    tmp_path: Path, target: FakeTarget, files: dict[str, str], version: str
) -> None:
    """The series is 1 as long as it is, at the first scrape too; a good graph beside it has 0."""
    make.write(tmp_path, make.PIPE)
    for name, text in files.items():
        (tmp_path / "bad" / name).parent.mkdir(parents=True)
        (tmp_path / "bad" / name).write_text(text)
    async with make.started(tmp_path, target) as s:
        sample = sampled(s.core)
        assert 1 == sample("weft_graph_load_failed", graph="bad", version=version)
        assert 0 == sample("weft_graph_load_failed", graph="pipe", version="1")


async def test_a_reload_that_fails_shows_until_one_works(tmp_path: Path, target: FakeTarget) -> None:
    """What serves meanwhile goes on."""
    make.write(tmp_path, make.PIPE)
    async with make.started(tmp_path, target, model_control="explicit", load_graphs=["*"]) as s:
        sample = sampled(s.core)
        for text, expected in ((make.PIPE.replace('"double"', '"missing"'), 1), (make.PIPE, 0)):
            make.write(tmp_path, text)
            with contextlib.suppress(WeftError):
                await s.core.load("pipe", {})
            assert expected == sample("weft_graph_load_failed", graph="pipe", version="1")
            assert "OK" == await call(s.core, "pipe")


async def test_the_replicas_that_serve_are_counted_down_to_none() -> None:
    """One that is ejected, leaves or is unhealthy is none; a target without any has a series with 0."""
    target, _ = await two_replicas()
    catalog = TargetCatalog([target])
    registry = CollectorRegistry()
    registry.register(TargetCollector(catalog))

    def serving() -> Any:
        return registry.get_sample_value(SERVING, {"target": "model"})

    first, second = target.replicas
    assert 2 == serving()
    first.record.until_ns = 2**62
    assert 1 == serving()
    second.health = Health.UNREACHABLE
    assert 0 == serving()
    second.health, second.is_leaving = Health.SERVING, True
    assert 0 == serving()
    await target.close()
