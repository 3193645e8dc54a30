"""A mesh in the foreground, for ``weft up``: its log, its endpoints, and signals."""

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TypeVar

from weft.base.observing import logs
from weft.base.observing.console import Console, has_colours
from weft.base.processes.process import Endpoint
from weft.base.text.suggestion import printable
from weft.cli.arguments import made
from weft.mesh.mesh import Mesh, MeshOptions
from weft.mesh.preflight import MeshError
from weft.mesh.service_names import PAGE, ROUTER, is_public
from weft.v2.server import server

T = TypeVar("T")

_log = logs.get_logger("weft.mesh")


def serve(
    options: argparse.Namespace, router_arguments: Sequence[str], service_arguments: Mapping[str, Sequence[str]]
) -> int:
    """Serve until a signal; the exit status of ``weft up``."""
    return asyncio.run(_serve(options, router_arguments, service_arguments))


async def _serve(
    options: argparse.Namespace, router_arguments: Sequence[str], service_arguments: Mapping[str, Sequence[str]]
) -> int:
    logs.configure(options.log_level, "weft", is_json=options.json)
    mesh = Mesh(
        made(
            MeshOptions,
            options,
            router_arguments=router_arguments,
            service_arguments=service_arguments,
            replicas=dict(options.replicas),
            is_restarting=not options.no_restart,
            is_encrypted=options.tls_cert is not None,
            asks_for_keys=bool(options.auth_keys),
        ),
        log=lambda service, pid, line: logs.forward(line, service, pid),
    )
    stop = stop_event(on_second_signal=mesh.kill, watch_stdin=options.stop_with_stdin)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, mesh.restart)
    endpoints = None
    try:
        endpoints = await until(stop, mesh.start())
        if endpoints is None:
            _log.info("stopped before the mesh was ready")
        else:
            as_json = {name: endpoint.as_json() for name, endpoint in endpoints.items()}
            encrypted = options.tls_cert is not None
            text = json.dumps(as_json) if options.json else _as_text(endpoints, mesh.summary(), is_encrypted=encrypted)
            logs.flush()  # so that it comes last on a terminal
            try:
                print(text, file=sys.__stdout__, flush=True)
            except OSError as error:
                raise MeshError(f"the endpoints cannot be written to standard output: {error.strerror}") from error
            await until(stop, mesh.watch())
    except MeshError as error:
        endpoints = None
        _log.error("%s", error)
    finally:
        await mesh.stop()
    return 0 if endpoints is not None and mesh.has_ended_well else 1


async def until(stop: asyncio.Event, work: Coroutine[None, None, T]) -> T | None:
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


def stop_event(*, on_second_signal: Callable[[], None], watch_stdin: bool) -> asyncio.Event:
    """An event that SIGINT, SIGTERM, SIGHUP and, on request, the end of standard input set."""
    is_under_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return server.stop_event(
        watch_stdin=watch_stdin,
        end_now=on_second_signal,
        signals=[signal.SIGINT, signal.SIGTERM, *([] if is_under_nohup else [signal.SIGHUP])],
        on_stop=lambda number: _log.info("%s: stopping; once more kills at once", number.name),
    )


def _as_text(endpoints: Mapping[str, Endpoint], summary: str, *, is_encrypted: bool) -> str:
    rows = [("service", "gRPC", "metrics")]
    router = endpoints[ROUTER]
    also = ""
    for name, endpoint in endpoints.items():
        scheme = "https" if is_encrypted and (is_public(name) or endpoint == router) else "http"
        rows.append((name, endpoint.grpc or "-", f"{scheme}://{endpoint.metrics}/metrics"))
        if name == PAGE:
            also += f"Page: http://{endpoint.http}/ui/\n"
        elif endpoint.http:
            also = f"OpenAI's interface: {scheme}://{endpoint.http}/v1\n"
    table = "\n".join(f"{name:<12}{grpc:<22}{metrics}" for name, grpc, metrics in rows)
    console = Console(is_coloured=sys.__stdout__ is not None and sys.__stdout__.isatty() and has_colours())
    summary = "\n".join(
        console.styled(printable(line), "33" if " not: " in f"{line} " or line.startswith("  ") else "32")
        for line in summary.splitlines()
    )
    return f"{table}\n{also}{summary}\nCtrl-C stops it."
