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
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TypeVar

from weft.base.observing.logs import LineWriter
from weft.base.processes.process import Endpoint
from weft.base.repository.control import add_completion_argument
from weft.base.security.arguments import add_server_arguments, given_to_server, server_fault
from weft.base.text.argument_types import add, not_negative, num_workers, positive
from weft.cli.arguments import (
    ROUTER_PORT,
    loaded_models,
    made,
    message_bytes,
    model_control,
    port,
    replicas,
    service_arguments,
    services,
)
from weft.mesh.mesh import Mesh, MeshOptions
from weft.mesh.preflight import MeshError
from weft.mesh.service_names import GATEWAY, MODEL_SERVICES, ROUTER, is_public
from weft.router.arguments import add_arguments as add_router_arguments
from weft.router.arguments import given, usage_fault
from weft.v2.client.wires import add_wire_argument
from weft.v2.server.arguments import add_limit_arguments, given_limits

T = TypeVar("T")

#: What the router may add to a request before it goes on, in bytes: names of models and ids, headers, parameters.
_HOP_BYTES = 1 << 16
_MAX_MESSAGE_BYTES = (1 << 31) - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``weft up``."""
    option = partial(add, parser)
    parser.description = (
        "Start preprocess, model, postprocess and router as local processes; stop all of them at Ctrl-C."
    )
    option("--repository DIR (./model_repository)", kind=Path)
    option("--host HOST", "address the router listens on; the others stay local", default="127.0.0.1")
    option("--router-port N", "gRPC; 0 is any free port", port, ROUTER_PORT)
    option("--metrics-port N", "the router's metrics; default: router port + 1", port)
    option(
        "--http-port --openai-port N",
        "serve V2 over HTTP and OpenAI's interface there; 0 is any free port (default: do not)",
        port,
    )
    option(
        "--batch-dir DIR",
        "with --http-port: folder of the files and batches of OpenAI's interface (default: neither is offered)",
        Path,
    )
    option(
        "--in-process NAME,NAME",
        "run these services in the router's process, all of them if no name is given",
        services,
        (),
        nargs="?",
        const=MODEL_SERVICES,
    )
    option("--router-workers N (1)", "processes of the router, behind one port", num_workers)
    option(
        "--replicas NAME=COUNT ...",
        "start so many processes of this service; may be repeated; default: one of each",
        replicas,
    )
    option(
        "--service-args NAME='ARGUMENTS' ...",
        "more arguments of this service, for example model='--load-on-demand --warm-models 2'; may be repeated",
        service_arguments,
    )
    option(
        "--max-message-bytes N",
        "largest message that the router takes and gives, and services behind with what it adds; default: 2 GiB",
        message_bytes,
    )
    add_wire_argument(parser)
    add_completion_argument(parser)
    option("--json", "print one line of JSON with every endpoint and pid")
    option("--stop-with-stdin", "stop when standard input ends, so as not to outlive the parent")
    option("--start-timeout-s S (180)", kind=positive)
    option("--grace-s S (20)", "how long stopping may take", positive)
    option("--no-restart", "a service that dies stays dead, and the others go on")
    option(
        "--exit-on-error", "end if a model or graph cannot be loaded; without it the others are served, and it is told"
    )
    option(
        "--hang-timeout-s S (30)",
        "kill and restart a service that has not answered a health check for so long; 0: never",
        not_negative,
    )
    add_router_arguments(
        parser.add_argument_group(
            "router",
            "poll and explicit are for models too, all of which are loaded first, but of a repository of Triton "
            "Inference Server those that --load-model names; the rest is for graphs alone",
        )
    )
    option("--allow-client-shm", "clients on this machine may pass tensors to the router in shared memory")
    add_server_arguments(parser.add_argument_group("security of the router's ports"))
    add_limit_arguments(parser.add_argument_group("limits of connections, for every service"), has_defaults=False)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; 0 if every service served until then and exited by itself, else 1.

    SIGUSR1 replaces every service by a new process, one after another, without a gap.
    """
    if fault := _port_fault(options) or server_fault(options) or usage_fault(options) or _process_fault(options):
        print(f"weft: {fault}", file=sys.stderr)
        return 2
    if options.metrics_port is None:
        options.metrics_port = options.router_port + 1 if 0 < options.router_port < 65535 else 0
    return asyncio.run(_up(options))


def _port_fault(options: argparse.Namespace) -> str:
    if 0 < options.router_port == options.metrics_port:
        return f"--router-port and --metrics-port are both {options.router_port}; choose two"
    if options.batch_dir is not None and options.http_port is None:
        return "--batch-dir needs --http-port, at which its files and batches are offered"
    return ""


def _process_fault(options: argparse.Namespace) -> str:
    if options.router_workers > 1 and options.in_process:
        return (
            f"--router-workers {options.router_workers}: --in-process runs models in the router's process, which can "
            "then not be several"
        )
    for name, count in options.replicas:
        if name in options.in_process:
            return f"--replicas {name}={count}: --in-process runs '{name}' in the router; replicas are processes"
    names = [name for name, _ in options.replicas]
    return "" if len(names) == len(set(names)) else f"--replicas: each name may be given once, got {', '.join(names)}"


def _service_arguments(options: argparse.Namespace) -> dict[str, list[str]]:
    arguments = dict.fromkeys(MODEL_SERVICES, model_control(options))
    # The router checks the keys.
    arguments[GATEWAY] = [argument for argument in given_to_server(options) if argument.startswith("--tls-")]
    limits = [*_shared_arguments(options)]
    if options.max_message_bytes is not None:
        limit_bytes = min(options.max_message_bytes + _HOP_BYTES, _MAX_MESSAGE_BYTES)
        limits.append(f"--max-message-bytes={limit_bytes}")
    for name in set(MODEL_SERVICES) - set(options.in_process):
        arguments[name] = [*arguments[name], *limits]
    arguments[GATEWAY].append(f"--wire={options.wire}")
    if options.batch_dir is not None:
        arguments[GATEWAY].append(f"--batch-dir={options.batch_dir}")
    for name, more in options.service_args:
        if name != ROUTER:
            arguments[name] = [*arguments[name], *more]
    return arguments


def _router_arguments(options: argparse.Namespace) -> list[str]:
    arguments = [*given(options, unless=loaded_models(options)), *given_to_server(options), *_shared_arguments(options)]
    if options.allow_client_shm:
        arguments.append("--allow-client-shm")
    if options.max_message_bytes is not None:
        arguments.append(f"--max-message-bytes={options.max_message_bytes}")
    if options.router_workers > 1:  # their parent kills one that hangs, within twice that time, before all would be
        arguments += [f"--workers={options.router_workers}", f"--watchdog-abort-s={options.hang_timeout_s / 3:g}"]
    return [*arguments, *(argument for name, more in options.service_args if name == ROUTER for argument in more)]


def _shared_arguments(options: argparse.Namespace) -> list[str]:
    """Arguments of every process that has a gRPC port."""
    is_strict = str(options.exit_on_error).lower()
    return [f"--wire={options.wire}", f"--strict-readiness={is_strict}", *given_limits(options)]


async def _up(options: argparse.Namespace) -> int:
    output = _StandardError(is_json=options.json)
    mesh = Mesh(
        made(
            MeshOptions,
            options,
            router_arguments=_router_arguments(options),
            service_arguments=_service_arguments(options),
            replicas=dict(options.replicas),
            is_restarting=not options.no_restart,
            is_encrypted=options.tls_cert is not None,
            asks_for_keys=bool(options.auth_keys),
        ),
        log=output.log,
        report=output.report,
    )
    stop = _stop_event(output.report, on_second_signal=mesh.kill, watch_stdin=options.stop_with_stdin)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, mesh.restart)
    endpoints = None
    try:
        endpoints = await _until(stop, mesh.start())
        if endpoints is None:
            output.report("stopped before the mesh was ready")
        else:
            as_json = {name: endpoint.as_json() for name, endpoint in endpoints.items()}
            text = json.dumps(as_json) if options.json else _as_text(endpoints, is_encrypted=bool(options.tls_cert))
            try:
                print(text, flush=True)
            except OSError as error:
                raise MeshError(f"the endpoints cannot be written to standard output: {error.strerror}") from error
            await _until(stop, mesh.watch())
    except MeshError as error:
        endpoints = None
        output.report(str(error))
    finally:
        await mesh.stop()
        output.flush()
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


def _stop_event(
    report: Callable[[str], None], *, on_second_signal: Callable[[], None], watch_stdin: bool
) -> asyncio.Event:
    """An event that SIGINT, SIGTERM, SIGHUP and, on request, the end of standard input set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        if stop.is_set():
            on_second_signal()
            return
        report(f"{number.name}: stopping; once more kills at once")
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started by nohup
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


def _as_text(endpoints: Mapping[str, Endpoint], *, is_encrypted: bool) -> str:
    rows = [("service", "gRPC", "metrics")]
    router = endpoints[ROUTER]
    openai = ""
    for name, endpoint in endpoints.items():
        scheme = "https" if is_encrypted and (is_public(name) or endpoint == router) else "http"
        rows.append((name, endpoint.grpc or "-", f"{scheme}://{endpoint.metrics}/metrics"))
        if endpoint.http:
            openai = f"OpenAI's interface: {scheme}://{endpoint.http}/v1\n"
    table = "\n".join(f"{name:<12}{grpc:<22}{metrics}" for name, grpc, metrics in rows)
    return f"{table}\n{openai}The mesh is SERVING. Ctrl-C stops it."


class _StandardError:
    """Standard error of ``weft up``; a reader that stops reading blocks nothing.

    Args:
        is_json: Pass JSON lines of services on unchanged, and wrap others. Else each line begins with the service's
            name.
    """

    def __init__(self, *, is_json: bool) -> None:
        self._is_json = is_json
        # Without a standard error its descriptor may belong to anything.
        self._writer = None if sys.stderr is None else LineWriter(sys.stderr.fileno(), "weft: %d lines were dropped")

    def report(self, message: str) -> None:
        """Print a message of ``weft up`` itself."""
        self._write("weft: " + message.replace("\n", "\nweft: "))

    def log(self, service: str, line: str) -> None:
        """Print a line that a service logged."""
        if not self._is_json:
            line = f"{service:<12}{line}"
        elif not line.startswith("{"):
            time = datetime.now(UTC).isoformat(timespec="milliseconds")
            line = json.dumps({"time": time, "level": "info", "logger": f"{service}.output", "message": line})
        self._write(line)

    def flush(self) -> None:
        """Wait until everything is written, unless the reader has stopped."""
        if self._writer is not None:
            self._writer.flush()

    def _write(self, text: str) -> None:
        if self._writer is not None:
            self._writer.write(text)
