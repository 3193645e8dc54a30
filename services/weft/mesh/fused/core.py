"""Router and model services behind one V2 server, with Python calls between them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from weft.base.core import CallContext, IndexEntry, InferCall, InferResult, ParameterValue
from weft.base.signature import ModelSignature
from weft.base.statistics import ModelStatistics
from weft.router.core import RouterCore
from weft.router.targets.in_process import InProcessTarget
from weft.serving.calls import Callee
from weft.serving.core import ServingCore
from weft.v2.server.server import Extension
from weft_protos.model_config_pb2 import ModelConfig


class FusedCore:
    """A router whose targets are, among others, cores of this process; make it on the event loop it will run on.

    It answers as a router does over services in processes of their own, with three differences: it is ready only while
    the models are ready too, clients load and unload models through it, and a model's counters are those of its own
    service. Models call other models and graphs through the router.

    Args:
        services: Functions that make the cores, by service; each takes what its models call.
        make_router: Makes the router over these targets and its others.
    """

    def __init__(
        self,
        services: Mapping[str, Callable[[Callee], ServingCore]],
        make_router: Callable[[Sequence[InProcessTarget]], RouterCore],
    ) -> None:
        router = InProcessTarget("router", self)
        self._cores = {name: make(router) for name, make in services.items()}
        self._router = make_router([InProcessTarget(name, core) for name, core in self._cores.items()])

    async def start(self) -> None:
        """Start the models, then the graphs; the index says what cannot serve. Raises as the cores do."""
        await asyncio.gather(*(core.start() for core in self._cores.values()))
        await self._router.start()

    async def close(self, *, grace_s: float) -> None:
        """Stop the router, then every model."""
        end_s = time.monotonic() + grace_s
        await self._router.close(grace_s=grace_s)
        left_s = max(0.0, end_s - time.monotonic())
        await asyncio.gather(*(core.close(grace_s=left_s) for core in self._cores.values()))

    def extension(self) -> Extension:
        """What the router and the services offer beside the V2 protocol."""
        extension = self._router.extension()
        collectors = {name: core.extension().collectors for name, core in self._cores.items()}
        return extension._replace(collectors=(*extension.collectors, ServiceCollector(collectors)))

    def is_ready(self) -> bool:
        """Whether every graph and every model is."""
        return self._router.is_ready() and all(core.is_ready() for core in self._cores.values())

    def is_model_ready(self, name: str, version: str) -> bool:
        """As ``RouterCore.is_model_ready``."""
        return self._router.is_model_ready(name, version)

    def signature(self, name: str, version: str) -> ModelSignature:
        """As ``RouterCore.signature``."""
        return self._router.signature(name, version)

    def config(self, name: str, version: str) -> ModelConfig:
        """As ``RouterCore.config``."""
        return self._router.config(name, version)

    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """As ``RouterCore.index``, and the models that could not be loaded, with the reason."""
        entries = self._router.index(ready_only=ready_only)
        names = {entry.name for entry in entries}
        own = (entry for core in self._cores.values() for entry in core.index(ready_only=ready_only))
        return entries + [entry for entry in own if entry.name not in names]

    def statistics(self, name: str, version: str) -> list[ModelStatistics]:
        """As ``RouterCore.statistics``."""
        return self._router.statistics(name, version)

    def infer(self, call: InferCall, context: CallContext) -> Coroutine[Any, Any, InferResult]:
        """As ``RouterCore.infer``."""
        return self._router.infer(call, context)

    def stream_infer(self, call: InferCall, context: CallContext) -> AsyncGenerator[InferResult, None]:
        """As ``RouterCore.stream_infer``."""
        return self._router.stream_infer(call, context)

    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a graph, as ``RouterCore.load``, or else a model of this process, as ``ServingCore.load``."""
        service = await self._service_of(name)
        if not service:
            await self._router.load(name, parameters)
            return
        try:
            await self._cores[service].load(name, parameters)
        finally:
            await self._router.refresh(service)

    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph, as ``RouterCore.unload``, or else a model of this process, as ``ServingCore.unload``."""
        service = await self._service_of(name)
        if not service:
            await self._router.unload(name, unload_dependents=unload_dependents)
            return
        try:
            await self._cores[service].unload(name, unload_dependents=unload_dependents)
        finally:
            await self._router.refresh(service)

    async def _service_of(self, name: str) -> str:
        """The service in this process that has a model of that name; "" if none has, or a graph hides it."""
        if not self._router.has_graph(name):
            for service, core in self._cores.items():
                if await core.has_model(name):
                    return service
        return ""


class ServiceCollector(Collector):
    """The metrics of several services as one, each sample with the label ``service``.

    Args:
        collectors: By service.
    """

    def __init__(self, collectors: Mapping[str, Sequence[Collector]]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        """Every family of any service."""
        families: dict[str, Metric] = {}
        for service, collectors in self._collectors.items():
            for metric in (metric for collector in collectors for metric in collector.collect()):
                family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                family.samples += [s._replace(labels={**s.labels, "service": service}) for s in metric.samples]
        yield from families.values()
