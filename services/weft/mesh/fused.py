"""``python -m weft.mesh.fused``: router and model services in one process, which call one another directly."""

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from weft.base.core import IndexEntry, ParameterValue
from weft.router.core import RouterCore
from weft.router.target import Target
from weft.router.targets.in_process import InProcessTarget
from weft.router.targets.model_control import MODEL_TARGET
from weft.services.router import fault_of, make_parser
from weft.services.router import make_core as make_router
from weft.serving.calls import Callee
from weft.serving.core import ServingCore
from weft.serving.main import add_arguments, make_core, usage_fault
from weft.v2.server import server
from weft.v2.server.servicer import Extension

#: Module with the backends of each service; imported when the service is to run here, as it may not be installed.
_BACKENDS = {
    "preprocess": "weft.backends.preprocess",
    "model": "weft.backends",
    "postprocess": "weft.backends.postprocess",
}


class FusedCore(RouterCore):
    """A router some of whose targets are cores in this process; create it on the event loop that runs it.

    It answers like a router over separate services, with three differences: it is ready only while the models are ready
    too, clients load and unload models through it, and a model's counters are those of its own service. Models call
    other models and graphs through the router.

    Args:
        services: Functions that make the cores, by service; each takes the callee of its models' nested calls.
        repository, targets, settings: Of the router; its targets come after the services.
    """

    def __init__(
        self,
        services: Mapping[str, Callable[[Callee], ServingCore]],
        repository: Path,
        targets: Sequence[Target] = (),
        **settings: Any,
    ) -> None:
        router = InProcessTarget("router", self)
        self._cores = {name: make(router) for name, make in services.items()}
        own = [InProcessTarget(name, core) for name, core in self._cores.items()]
        super().__init__(repository, [*own, *targets], **settings)

    @override
    async def start(self) -> None:
        """Start the models, then the graphs; failures are in the index. Raises like the cores."""
        await asyncio.gather(*(core.start() for core in self._cores.values()))
        await super().start()

    @override
    async def close(self, *, grace_s: float) -> None:
        """Stop the router, then every model."""
        end_s = time.monotonic() + grace_s
        await super().close(grace_s=grace_s)
        left_s = max(0.0, end_s - time.monotonic())
        await asyncio.gather(*(core.close(grace_s=left_s) for core in self._cores.values()))

    @override
    def extension(self) -> Extension:
        extension = super().extension()
        collectors = {name: core.extension().collectors for name, core in self._cores.items()}
        return extension._replace(collectors=(*extension.collectors, ServiceCollector(collectors)))

    @override
    def is_ready(self) -> bool:
        return super().is_ready() and all(core.is_ready() for core in self._cores.values())

    @override
    def index(self, *, ready_only: bool) -> list[IndexEntry]:
        """Like ``RouterCore.index``, and the models that could not be loaded, with the reason."""
        entries = super().index(ready_only=ready_only)
        names = {entry.name for entry in entries}
        own = (entry for core in self._cores.values() for entry in core.index(ready_only=ready_only))
        return entries + [entry for entry in own if entry.name not in names]

    @override
    async def load(self, name: str, parameters: Mapping[str, ParameterValue | bytes]) -> None:
        """Load a graph, as ``RouterCore.load``, or else a model of this process, as ``ServingCore.load``."""
        service = await self._service_of(name)
        if not (service or self.has_graph(name)) and any(isinstance(value, bytes) for value in parameters.values()):
            service = MODEL_TARGET if MODEL_TARGET in self._cores else ""
        if not service:
            await super().load(name, parameters)
            return
        try:
            await self._cores[service].load(name, parameters)
        finally:
            await self.refresh(service)

    @override
    async def unload(self, name: str, *, unload_dependents: bool) -> None:
        """Unload a graph, as ``RouterCore.unload``, or else a model of this process, as ``ServingCore.unload``."""
        service = await self._service_of(name)
        if not service:
            await super().unload(name, unload_dependents=unload_dependents)
            return
        try:
            await self._cores[service].unload(name, unload_dependents=unload_dependents)
        finally:
            await self.refresh(service)

    async def _service_of(self, name: str) -> str:
        """The service in this process that has the model; "" if none, or if a graph hides it."""
        if not self.has_graph(name):
            for service, core in self._cores.items():
                if await core.has_model(name):
                    return service
        return ""


class ServiceCollector(Collector):
    """Merges the metrics of several services; each sample gets the label ``service``."""

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


def main(argv: Sequence[str] | None = None) -> int:
    """Serve graphs and models until a signal stops it; the exit status is that of ``weft.services.router.main``."""
    parser = make_parser("weft.mesh.fused", "Serve graphs over model services, some of them in this process.")
    parser.add_argument(
        "--in-process",
        type=_service,
        action="append",
        required=True,
        metavar="'NAME ARGUMENTS'",
        help="run this service here, with its own arguments but those of its ports, for example "
        "'model --repository models'; may be repeated; before every --target",
    )
    options = parser.parse_args(argv)
    if fault := fault_of(options, [name for name, _ in options.in_process]):
        print(f"weft.mesh.fused: error: {fault}", file=sys.stderr)
        return 2
    makers = {
        name: partial(make_core, own, import_module(_BACKENDS[name]).BACKENDS, wire=options.wire)
        for name, own in options.in_process
    }
    make = partial(FusedCore, makers)
    return server.run("router", lambda: make_router(options, make), options, extend=FusedCore.extension)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises errors instead of ending the process."""

    @override
    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentTypeError(message)


def _service(text: str) -> tuple[str, argparse.Namespace]:
    """Name of a service to run in this process, and its options."""
    try:
        name, *arguments = shlex.split(text) or [""]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}': {error}") from None
    if name not in _BACKENDS:
        raise argparse.ArgumentTypeError(f"'{text}' must begin with one of {', '.join(_BACKENDS)}")
    parser = _Parser(add_help=False)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    if fault := usage_fault(options):
        raise argparse.ArgumentTypeError(fault)
    return name, options


if __name__ == "__main__":
    sys.exit(main())
