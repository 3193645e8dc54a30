"""A service process: from arguments to SERVING to graceful shutdown.

Order of a shutdown (SIGTERM, SIGINT, or end of standard input with ``--stop-with-stdin``): health becomes NOT_SERVING,
new calls are held, every connection gets GOAWAY, calls in flight and held calls finish within the grace period, models
are closed, spans are exported, exit status 0. A client with another server, on the same address with ``--take-over``,
loses no request.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from weft.base.core import InferenceCore
from weft.base.errors import UnavailableError, WeftError
from weft.base.observing import logs, telemetry
from weft.base.observing.watchdog import LoopWatchdog
from weft.base.processes.malloc import keep_freed_memory
from weft.base.security.arguments import add_server_arguments
from weft.base.statistics import ModelStatistics
from weft.base.text.argument_types import add
from weft.v2.client.channels import MAX_MESSAGE_BYTES
from weft.v2.client.wires import add_wire_argument
from weft.v2.protocol.services import HEALTH
from weft.v2.protocol.shared_memory import SharedMemory
from weft.v2.server.arguments import add_limit_arguments, add_process_arguments
from weft.v2.server.health import HealthServicer
from weft.v2.server.listening import Listener, Ports, Worker
from weft.v2.server.make_server import add_reflection, add_v2_service
from weft.v2.server.servicer import NO_EXTENSION, Extension, V2Servicer
from weft.v2.server.unix_socket import LocalTensorService
from weft.wire.interface import grpc
from weft_protos import grpc_service_pb2


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop if it is installed (`pip install 'weft-mesh[uvloop]'`), else asyncio's own."""
    try:
        import uvloop  # noqa: PLC0415  # 14 MB, which are optional
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


SERVICE_NAME = grpc_service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
HEALTH_SERVICE_NAME = HEALTH.full_name

#: Period of the health update from readiness, in seconds.
HEALTH_PERIOD_S = 0.2

#: Timeout of ``/metrics`` for the event loop, in seconds.
METRICS_WAIT_S = 5.0

#: A draining server holds new calls until none has come for this time, in seconds, and then stops listening. gRPC
#: cancels calls that no handler has seen by then: without this, 12 of 32 concurrent clients lost a call at a stop.
DRAIN_LINGER_S = 0.1
#: Limit of that, in seconds and as a share of the grace period, the rest of which is for calls in flight.
DRAIN_LIMIT_S = 1.0
DRAIN_LIMIT_SHARE = 0.25

#: Timeout from loaded to ready of a process that takes over, in seconds.
TAKE_OVER_S = 3.0

#: New objects after which the garbage collector looks at them. Those of some dozen requests in flight are more than its
#: default of 700, so that it looked at each wave of requests: three steps at 32 in flight cost 88 us of CPU in place of
#: 97 in one process, and 206 in place of 260 through processes (2 cores AMD EPYC, Python 3.11).
_NUM_YOUNG_OBJECTS = 3000

_log = logs.get_logger("weft.server")


class ClosableCore(InferenceCore, Protocol):
    """A core that a server process owns."""

    async def start(self) -> None:
        """Load the configured models. Load failures are reported in the index, not raised."""

    async def close(self, *, grace_s: float) -> None:
        """Finish requests in flight within ``grace_s`` and release everything."""


Core = TypeVar("Core", bound=ClosableCore)


def add_arguments(parser: argparse.ArgumentParser, *, grpc_port: int, metrics_port: int) -> None:
    """Add the arguments of every service; the given ports are the defaults."""
    add_process_arguments(parser, metrics_port=metrics_port)
    option = partial(add, parser)
    option("--grpc-port GRPC_PORT", "0: chosen by the system (default %(default)s)", int, grpc_port)
    option("--unix-socket PATH", "listen there too, in plaintext, for callers of this user on this machine", Path)
    option("--max-message-bytes MAX_MESSAGE_BYTES", "largest message (default %(default)s)", int, MAX_MESSAGE_BYTES)
    add_limit_arguments(parser.add_argument_group("limits of connections"))
    add_wire_argument(parser)
    option(
        "--allow-client-shm",
        "clients on this machine may pass tensors in shared memory of the system, or of CUDA devices",
    )
    option(
        "--server-id NAME",
        "name in ServerMetadata; some clients of Triton Inference Server want it to be 'triton' (default: that of the "
        "service, as 'weft.model')",
    )
    option(
        "--strict-readiness BOOL",
        "true: ready while everything that should serve does; false: as soon as it answers, whatever is missing "
        "(default true)",
        _boolean,
        True,
    )
    add_server_arguments(parser)


def run(
    service: str,
    make_core: Callable[[], Core],
    options: argparse.Namespace,
    *,
    extend: Callable[[Core], Extension] = lambda core: NO_EXTENSION,
    worker: Worker | None = None,
) -> int:
    """Serve until stopped, alone or as one ``worker`` among several, and return the exit status."""
    keep_freed_memory()
    logs.configure(options.log_level, service, None if worker is None else {"worker": worker.place.index})
    try:
        telemetry.configure(f"weft.{service}")
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        return 1
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return runner.run(_serve(service, make_core, options, extend, worker))
    finally:
        telemetry.shutdown()


class Services(NamedTuple):
    """Servicers of a server, apart from reflection."""

    inference: V2Servicer
    health: HealthServicer


async def _serve(
    service: str,
    make_core: Callable[[], Core],
    options: argparse.Namespace,
    extend: Callable[[Core], Extension],
    worker: Worker | None,
) -> int:
    stop = stop_event(watch_stdin=options.stop_with_stdin)
    try:
        listener = Listener(f"weft.{service}", options, worker)
        core = make_core()
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        return 1
    server = listener.server
    extension = extend(core)
    memory = SharedMemory() if options.allow_client_shm else None
    is_loaded = asyncio.Event()
    is_ready = core.is_ready if options.strict_readiness else is_loaded.is_set
    services = add_services(server, core, f"weft.{service}", extension, memory, is_ready, listener.local_tensors)
    services.inference.server_id = options.server_id or services.inference.server_id
    watchdog = LoopWatchdog(abort_s=options.watchdog_abort_s)

    async def listen() -> Ports:
        ports = listener.listen(_reader_of(core), (*extension.collectors, watchdog))
        await server.start()
        return ports

    ports = None
    if not (options.take_over or (worker is not None and worker.place.listens_late)):
        try:
            ports = await listen()
        except WeftError as error:
            _log.error("%s", error.message)
            return 1
    loading = asyncio.create_task(core.start())
    stopping = asyncio.create_task(stop.wait())
    exit_status = 0
    try:
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            await loading
            _keep_collector_from_requests()
            is_loaded.set()
            if ports is None:
                await _wait_until_ready(is_ready, core, stop, is_required=options.take_over)
                ports = await listen()
            is_serving = (options.strict_readiness and extension.is_serving) or is_ready
            services.health.set_serving(is_serving())
            watcher = asyncio.create_task(_follow_readiness(is_serving, services))
            endpoints = {"service": service} | ports._asdict()
            print(json.dumps(endpoints), file=sys.__stdout__, flush=True)  # the parent reads the ports from this line
            _log.info("serving", extra=endpoints | {"wire": options.wire, "num_frozen_objects": gc.get_freeze_count()})
            await stopping
            watcher.cancel()
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        exit_status = 1
    _log.info("stopping", extra={"service": service, "grace_s": options.grace_s})
    await _stop(server, services, core, loading, options.grace_s)
    listener.close()
    watchdog.close()
    return exit_status


async def _stop(
    server: grpc.aio.Server, services: Services, core: ClosableCore, loading: "asyncio.Task[None]", grace_s: float
) -> None:
    """Stop serving; tell the log, and the parent process, what clients have lost."""
    stop_at_s = time.monotonic() + grace_s

    def left_s() -> float:
        return max(0.0, stop_at_s - time.monotonic())

    services.health.stop()
    loading.cancel()
    await asyncio.wait((loading,), timeout=grace_s)
    services.inference.drain()
    num_held, quiet_by_s = -1, time.monotonic() + min(DRAIN_LIMIT_S, left_s() * DRAIN_LIMIT_SHARE)
    while num_held != services.inference.num_held and time.monotonic() < quiet_by_s:  # until no more come
        num_held = services.inference.num_held
        await asyncio.sleep(min(DRAIN_LINGER_S, left_s()))
    stopped = asyncio.create_task(server.stop(left_s()))
    await asyncio.sleep(0)  # sends GOAWAY now, so that no call follows those held
    services.inference.release()
    await stopped
    # A server of grpcio does not tell the number.
    num_lost = getattr(server, "num_cut_off", "unknown" if left_s() == 0 else 0)
    if num_lost:
        lost = f"calls that were in work after {grace_s:g} s: {num_lost}"
        _log.warning("clients lost %s", lost)
        tell_lost(lost)
    await core.close(grace_s=left_s())


def tell_lost(lost: str) -> None:
    """Tell the parent process, if it still reads, what clients have lost."""
    if sys.__stdout__ is not None:
        with contextlib.suppress(OSError):  # no buffer, which would fail again at exit
            os.write(sys.__stdout__.fileno(), f"{json.dumps({'lost': lost})}\n".encode())


def add_services(
    server: grpc.aio.Server,
    core: InferenceCore,
    service: str,
    extension: Extension = NO_EXTENSION,
    memory: SharedMemory | None = None,
    is_ready: Callable[[], bool] | None = None,
    local_tensors: LocalTensorService | None = None,
) -> Services:
    """Add the V2 service, health (initially NOT_SERVING), an extension and reflection to a server.

    Clients may pass tensors in ``memory``, if given; ``is_ready`` determines ``ServerReady``, by default that of the
    core.
    """

    def models() -> dict[str, bool]:
        entries = core.index(ready_only=False)
        return {entry.name: False for entry in entries} | {one.name: True for one in entries if one.state == "READY"}

    inference = V2Servicer(core, service, memory, is_ready, extension, local_tensors)
    services = Services(inference, HealthServicer((SERVICE_NAME,), models))
    add_v2_service(services.inference, server)
    services.health.add_to(server)
    more_names = extension.add_servicers(server)
    add_reflection(server, (SERVICE_NAME, *more_names, HEALTH_SERVICE_NAME))
    return services


def _reader_of(core: InferenceCore) -> Callable[[], Iterable[ModelStatistics]]:
    """A function for the metrics thread that reads the statistics on the event loop, which owns them."""
    loop = asyncio.get_running_loop()

    async def read() -> list[ModelStatistics]:
        return core.statistics("", "")

    return lambda: asyncio.run_coroutine_threadsafe(read(), loop).result(METRICS_WAIT_S)


async def _wait_until_ready(
    is_ready: Callable[[], bool], core: InferenceCore, stop: asyncio.Event, *, is_required: bool
) -> None:
    """Wait until everything is ready, or a stop was requested. Raises UnavailableError on timeout, if required."""
    end_s = time.monotonic() + TAKE_OVER_S
    while not (is_ready() or stop.is_set()):
        if time.monotonic() >= end_s:
            if not is_required:
                return
            reasons = [f"{e.name} is {e.state}: {e.reason}" for e in core.index(ready_only=False) if e.state != "READY"]
            raise UnavailableError("it does not take over, because not all is ready: " + "; ".join(reasons))
        await asyncio.sleep(HEALTH_PERIOD_S)


def _keep_collector_from_requests() -> None:
    """Long-lived objects are frozen, and young ones are collected less often.

    With torch loaded, each full collection would block the event loop for 0.38 s to traverse 190,000 objects (2 cores
    AMD EPYC, Python 3.11).
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NUM_YOUNG_OBJECTS)


async def _follow_readiness(is_serving: Callable[[], bool], services: Services) -> None:
    while True:
        await asyncio.sleep(HEALTH_PERIOD_S)
        services.health.set_serving(is_serving())


def stop_event(
    *,
    watch_stdin: bool,
    end_now: Callable[[], object] = lambda: os._exit(1),
    signals: Iterable[signal.Signals] = (signal.SIGTERM, signal.SIGINT),
    on_stop: Callable[[signal.Signals], object] = lambda number: None,
) -> asyncio.Event:
    """An event set by a signal, or by the end of standard input; at a second signal ``end_now`` is called."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            end_now()
        else:
            on_stop(number)
            stop.set()

    for number in signals:
        loop.add_signal_handler(number, on_signal, number)
    if watch_stdin:

        def wait_for_end() -> None:
            with contextlib.suppress(OSError):
                while os.read(0, 4096):
                    pass
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)

        threading.Thread(target=wait_for_end, name="stdin-watch", daemon=True).start()
    return stop


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"'{text}' must be true or false")
    return text.lower() == "true"
