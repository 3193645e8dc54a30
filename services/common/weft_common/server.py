"""One service process: from arguments to SERVING to a clean end.

The order of a stop (SIGTERM, SIGINT, or end of standard input with ``--stop-with-stdin``): health says NOT_SERVING, no
new call is taken, calls in work finish within the grace, models are closed, spans are exported, exit status 0.
"""

import argparse
import asyncio
import contextlib
import gc
import ipaddress
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.registry import Collector

from weft_common import logs, telemetry
from weft_common.channels import MAX_MESSAGE_BYTES, server_options
from weft_common.core import InferenceCore
from weft_common.errors import WeftError
from weft_common.health import HealthServicer
from weft_common.metrics import start_metrics_server
from weft_common.servicer import V2Servicer
from weft_common.shared_memory import SharedMemory
from weft_common.statistics import ModelStatistics
from weft_protos import grpc_service_pb2, grpc_service_pb2_grpc

SERVICE_NAME = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

#: How often readiness is compared with what health says, in seconds.
HEALTH_PERIOD_S = 0.2

#: How long ``/metrics`` waits for the event loop, in seconds.
METRICS_WAIT_S = 5.0

#: How long a server that drains still answers new calls, with UNAVAILABLE, in seconds.
DRAIN_LINGER_S = 0.1

_log = logs.get_logger("weft.server")


class ClosableCore(InferenceCore, Protocol):
    """A core that a server process owns."""

    async def start(self) -> None:
        """Load what is to be served. A model that cannot be loaded is reported by the index, not raised."""

    async def close(self, *, grace_s: float) -> None:
        """Finish what is in work within ``grace_s`` and release everything."""


class Extension(NamedTuple):
    """What a service offers beside the V2 protocol.

    Attributes:
        add_servicers: Adds them to a server and returns the full names of their gRPC services.
        collectors: Metrics beside those of the models; collected on the metrics server's thread.
    """

    add_servicers: Callable[[grpc.aio.Server], Sequence[str]] = lambda server: ()
    collectors: Sequence[Collector] = ()


Core = TypeVar("Core", bound=ClosableCore)

_NO_EXTENSION = Extension()


def add_arguments(parser: argparse.ArgumentParser, *, grpc_port: int, metrics_port: int) -> None:
    """Add the arguments that every service has; the ports given are the defaults."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    parser.add_argument(
        "--grpc-port", type=int, default=grpc_port, help="0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--metrics-port", type=int, default=metrics_port, help="0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--grace-s", type=float, default=10.0, help="time to finish work at a stop (default %(default)s)"
    )
    parser.add_argument(
        "--max-message-bytes", type=int, default=MAX_MESSAGE_BYTES, help="largest message (default %(default)s)"
    )
    parser.add_argument(
        "--allow-client-shm",
        action="store_true",
        help="clients on this machine may pass tensors in system shared memory",
    )
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    parser.add_argument(
        "--stop-with-stdin", action="store_true", help="stop when standard input ends, so as not to outlive the parent"
    )


def run(
    service: str,
    make_core: Callable[[], Core],
    options: argparse.Namespace,
    *,
    extend: Callable[[Core], Extension] = lambda core: _NO_EXTENSION,
) -> int:
    """Serve until told to stop and return the exit status.

    Args:
        service: ``router``, ``preprocess``, ``model`` or ``postprocess``.
        make_core: Called on the running event loop.
        options: Parsed arguments of ``add_arguments``.
        extend: What the core offers beside the V2 protocol.
    """
    logs.configure(options.log_level)
    try:
        telemetry.configure(f"weft.{service}")
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        return 1
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(service, make_core, options, extend))
    finally:
        telemetry.shutdown()


class Services(NamedTuple):
    """What a server offers beside reflection."""

    inference: V2Servicer
    health: HealthServicer


async def _serve(
    service: str, make_core: Callable[[], Core], options: argparse.Namespace, extend: Callable[[Core], Extension]
) -> int:
    stop = _stop_event(watch_stdin=options.stop_with_stdin)
    core = make_core()
    server = grpc.aio.server(options=server_options(options.max_message_bytes))
    extension = extend(core)
    memory = SharedMemory() if options.allow_client_shm else None
    services = add_services(server, core, f"weft.{service}", extension, memory)
    _warn_if_exposed(options.host)
    try:
        port_option, port = "--grpc-port", options.grpc_port
        grpc_port = server.add_insecure_port(_address(options.host, port))
        port_option, port = "--metrics-port", options.metrics_port
        metrics_port = start_metrics_server(_reader_of(core), options.host, port, extension.collectors)
    except (RuntimeError, OSError) as error:
        reason = str(error).partition(";")[0]  # gRPC goes on with advice on its own logs
        _log.error("cannot listen on %s: %s; choose another %s", _address(options.host, port), reason, port_option)
        return 1
    await server.start()
    loading = asyncio.create_task(core.start())
    stopping = asyncio.create_task(stop.wait())
    exit_status = 0
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            # What is there now stays: with torch loaded, each full collection would stop the event loop for 0.38 s to
            # look at 190,000 objects (2 cores AMD EPYC, Python 3.11); so it looks at none of them.
            gc.collect()
            gc.freeze()
            await set_serving(services, core.is_ready())
            watcher = asyncio.create_task(_follow_readiness(core, services))
            endpoints = {
                "service": service,
                "grpc": _address(options.host, grpc_port),
                "metrics": _address(options.host, metrics_port),
            }
            print(json.dumps(endpoints), flush=True)  # noqa: T201  # the parent reads the ports from this line
            _log.info("serving", extra=endpoints | {"num_frozen_objects": gc.get_freeze_count()})
            await stopping
            watcher.cancel()
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        exit_status = 1
    _log.info("stopping", extra={"service": service, "grace_s": options.grace_s})
    stop_at_s = time.monotonic() + options.grace_s
    services.health.stop()
    loading.cancel()
    await asyncio.wait((loading,), timeout=options.grace_s)
    services.inference.drain()
    # Calls that are on their way are refused by us: gRPC would give those that no handler has seen CANCELLED.
    await asyncio.sleep(min(DRAIN_LINGER_S, options.grace_s))
    await server.stop(max(0.0, stop_at_s - time.monotonic()))
    await core.close(grace_s=max(0.0, stop_at_s - time.monotonic()))
    return exit_status


def add_services(
    server: grpc.aio.Server,
    core: InferenceCore,
    service: str,
    extension: Extension = _NO_EXTENSION,
    memory: SharedMemory | None = None,
) -> Services:
    """Add the V2 service, health (NOT_SERVING until said otherwise), an extension and reflection to a server.

    Clients may pass tensors in ``memory``, if it is given.

    Returns:
        The servicers; call ``await set_serving(...)`` with them.
    """
    services = Services(V2Servicer(core, service, memory), HealthServicer((SERVICE_NAME,)))
    grpc_service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(services.inference, server)
    health_pb2_grpc.add_HealthServicer_to_server(services.health, server)
    more_names = extension.add_servicers(server)
    names = (SERVICE_NAME, *more_names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return services


async def set_serving(services: Services, is_serving: bool) -> None:
    """Make ``Check`` and ``Watch`` answer SERVING or NOT_SERVING, for the server ("") and for the V2 service."""
    services.health.set_serving(is_serving)


def _reader_of(core: InferenceCore) -> Callable[[], Iterable[ModelStatistics]]:
    """A function for the metrics thread that reads the statistics on the event loop, which owns them."""
    loop = asyncio.get_running_loop()

    async def read() -> list[ModelStatistics]:
        return core.statistics("", "")

    return lambda: asyncio.run_coroutine_threadsafe(read(), loop).result(METRICS_WAIT_S)


async def _follow_readiness(core: InferenceCore, services: Services) -> None:
    """Keep health equal to readiness."""
    while True:
        await asyncio.sleep(HEALTH_PERIOD_S)
        await set_serving(services, core.is_ready())


def _stop_event(*, watch_stdin: bool) -> asyncio.Event:
    """An event that a signal, or the end of standard input, sets; a second signal ends the process at once."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    if watch_stdin:

        def wait_for_end() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, name="stdin-watch", daemon=True).start()
    return stop


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _warn_if_exposed(host: str) -> None:
    """Say loudly that a plaintext port is reachable from other machines."""
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = host == "localhost"
    if not is_loopback:
        _log.warning("plaintext port without authentication listens on %s, which other machines can reach", host)
