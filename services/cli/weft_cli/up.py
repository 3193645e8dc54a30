"""``weft up``: the mesh on this machine, until a signal ends it."""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import TypeVar

from weft_cli.mesh import Mesh, MeshOptions
from weft_cli.preflight import MeshError
from weft_cli.process import Endpoint
from weft_router.arguments import given, usage_fault

T = TypeVar("T")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; 0 if every service served to the end and ended by itself, else 1."""
    if 0 < options.router_port == options.metrics_port:
        _report(f"--router-port and --metrics-port are both {options.router_port}; choose two")
        return 2
    if fault := usage_fault(options):
        _report(fault)
        return 2
    if options.metrics_port is None:
        options.metrics_port = options.router_port + 1 if 0 < options.router_port < 65535 else 0
    return asyncio.run(_up(options))


async def _up(options: argparse.Namespace) -> int:
    mesh = Mesh(
        MeshOptions(
            repository=options.repository,
            host=options.host,
            router_port=options.router_port,
            metrics_port=options.metrics_port,
            start_timeout_s=options.start_timeout_s,
            grace_s=options.grace_s,
            router_arguments=tuple(given(options)),
        ),
        log=_log_raw if options.json else _log_prefixed,
        report=_report,
    )
    stop = _stop_event(on_second_signal=mesh.kill, watch_stdin=options.stop_with_stdin)
    endpoints = None
    try:
        endpoints = await _until(stop, mesh.start())
        if endpoints is None:
            _report("stopped before the mesh was ready")
        else:
            try:
                print(_as_json(endpoints) if options.json else _as_text(endpoints), flush=True)
            except OSError as error:
                raise MeshError(f"the endpoints cannot be written to standard output: {error.strerror}") from error
            await _until(stop, mesh.watch())
    except MeshError as error:
        endpoints = None
        _report(str(error))
    finally:
        await mesh.stop()
    return 0 if endpoints is not None and mesh.has_ended_well else 1


async def _until(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
    """Result of ``work``, or None if ``stop`` is set first; ``work`` is then cancelled."""
    task = asyncio.create_task(work)
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return None
    finally:
        stopped.cancel()


def _stop_event(*, on_second_signal: Callable[[], None], watch_stdin: bool) -> asyncio.Event:
    """An event that SIGINT, SIGTERM and SIGHUP set, and, if wanted, the end of standard input."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            on_second_signal()
            return
        _report(f"{number.name}: stopping; once more kills at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, on_signal, number)

    def wait_for_end_of_input() -> None:
        with contextlib.suppress(OSError):
            while os.read(sys.stdin.fileno(), 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(stop.set)

    if watch_stdin:
        threading.Thread(target=wait_for_end_of_input, daemon=True).start()
    return stop


def _as_json(endpoints: Mapping[str, Endpoint]) -> str:
    return json.dumps({name: endpoint._asdict() for name, endpoint in endpoints.items()})


def _as_text(endpoints: Mapping[str, Endpoint]) -> str:
    rows = [("service", "gRPC", "metrics"), *((n, e.grpc, f"http://{e.metrics}/metrics") for n, e in endpoints.items())]
    table = "\n".join(f"{name:<12}{grpc:<22}{metrics}" for name, grpc, metrics in rows)
    return f"{table}\nThe mesh is SERVING. Ctrl-C stops it."


def _report(message: str) -> None:
    _write("weft: " + message.replace("\n", "\nweft: "))


def _log_prefixed(service: str, line: str) -> None:
    _write(f"{service:<12}{line}")


def _log_raw(service: str, line: str) -> None:
    _write(line)


def _write(text: str) -> None:
    if sys.stderr is not None:  # closed from the start; print would take standard output
        with contextlib.suppress(OSError):  # nobody reads it any more; serving goes on
            print(text, file=sys.stderr, flush=True)
