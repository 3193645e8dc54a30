"""Loads, unloads and statistics of models through the router, over real sockets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from tests.unit.router import make
from tests.unit.router.targets.test_target import TinyCore, serving

from weft.base.core import IndexEntry
from weft.base.errors import InvalidArgumentError, NotFoundError, RemoteError, UnavailableError
from weft.base.statistics import BatchStatistics, ModelStatistics
from weft.router.core import RouterCore
from weft.router.targets.connect import make_target
from weft.v2.server.servicer import V2Servicer
from weft_protos import grpc_service_pb2 as pb

_OUTER = """
name: "outer" platform: "graph" max_batch_size: 4
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]
output [ { name: "Z" data_type: TYPE_FP32 dims: [ 2 ] } ]
node { name: "root" sequence { step { name: "one" graph: "pipe" } } }
"""


class LoadableCore(TinyCore):
    """A service in explicit mode that loads `double` when it is told so; `asked` has what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ""
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        return [IndexEntry("double", "3" if self.state == "READY" else "", self.state, "")]

    async def load(self, name: str, parameters: Mapping[str, Any]) -> None:
        self.asked.append(("load", name, dict(parameters)))
        if self.error is not None:
            raise self.error
        self.state = "READY"

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        self.asked.append(("unload", name, {"unload_dependents": unload_dependents}))
        self.state = "UNAVAILABLE"


@pytest.mark.parametrize("policy", [(), ("two",)])
async def test_models_are_loaded_and_unloaded_through_the_router(tmp_path: Path, policy: tuple[str, ...]) -> None:
    """At every replica, with their parameters, and known as such when the answer comes; the service's mode counts."""
    first, second = LoadableCore(), LoadableCore()
    async with serving(first) as port, serving(second) as other:
        address = f"127.0.0.1:{port},127.0.0.1:{other}" if policy else f"127.0.0.1:{port}"
        cores = [first, second] if policy else [first]
        router = RouterCore(tmp_path, [make_target("model", address)])
        await router.start()
        try:
            with pytest.raises(NotFoundError):
                router.is_model_ready("double", "")
            await router.load("double", {"config": "{}"})
            assert router.is_model_ready("double", "")
            await router.unload("double", unload_dependents=True)
            for core in cores:
                told = [("load", "double", {"config": "{}"}), ("unload", "double", {"unload_dependents": True})]
                assert told == core.asked
                core.error = InvalidArgumentError("failed to load 'double': bad file")
            with pytest.raises(RemoteError, match="bad file") as caught:
                await router.load("double", {})
            assert "INVALID_ARGUMENT" == caught.value.code
            sent: dict[str, str | bytes] = {"config": "{}", "file:1/model.py": b"x"}
            with pytest.raises(RemoteError, match="bad file"):
                await router.load("double", sent)
            assert all(("load", "double", sent) == core.asked[-1] for core in cores)
            with pytest.raises(UnavailableError, match="--model-control-mode explicit"):
                await router.load("nobody", {})
        finally:
            await router.close(grace_s=0)


async def test_a_graph_that_is_loaded_loads_its_models(tmp_path: Path) -> None:
    """Those that no service serves yet, also of a graph in it; what a service says of one is in the graph's error."""
    core = LoadableCore()
    core.error = InvalidArgumentError("failed to load 'double': bad file")
    make.write(tmp_path, make.PIPE)
    make.write(tmp_path, _OUTER, "outer")
    async with serving(core) as port:
        router = RouterCore(tmp_path, [make_target("model", f"127.0.0.1:{port}")], model_control="explicit")
        await router.start()
        try:
            with pytest.raises(InvalidArgumentError, match="double"):
                await router.load("outer", {})
            core.error = None
            await router.load("outer", {})
            assert router.is_model_ready("outer", "")
            await router.load("outer", {})
            assert [("load", "double", {})] * 2 == core.asked
        finally:
            await router.close(grace_s=0)


class CountingCore(TinyCore):
    """Keeps counters, with batches of a size."""

    def __init__(self) -> None:
        super().__init__()
        self.counters = ModelStatistics("double", "3", inference_count=5, execution_count=2)
        self.counters.batches[4] = BatchStatistics()
        self.counters.batches[4].add(1, 2, 3)

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        return [self.counters]


async def test_statistics_of_a_model_are_those_of_its_service(tmp_path: Path) -> None:
    """Through the router: with batches, summed over the replicas; of a service that is gone what was seen from here."""
    first, second = CountingCore(), CountingCore()
    async with serving(first) as port, serving(second) as other:
        router = RouterCore(tmp_path, [make_target("model", f"127.0.0.1:{port},127.0.0.1:{other}")])
        await router.start()
        servicer = V2Servicer(router, "weft.router", extension=router.extension())
        for name in ("", "double"):
            answer = await servicer.ModelStatistics(pb.ModelStatisticsRequest(name=name), MagicMock())
            (found,) = answer.model_stats
            (batch,) = found.batch_stats
            assert (10, 4, 4, 2) == (
                found.inference_count, found.execution_count, batch.batch_size, batch.compute_infer.count
            )  # fmt: skip
    (found,) = (await servicer.ModelStatistics(pb.ModelStatisticsRequest(name="double"), MagicMock())).model_stats
    assert ("double", 0) == (found.name, found.inference_count)
    await router.close(grace_s=0)
