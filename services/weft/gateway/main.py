"""The gateway process: start, serve, graceful shutdown.

Shutdown (SIGTERM, SIGINT, or end of standard input with ``--stop-with-stdin``): ``/health`` fails, no connection is
accepted, requests in flight get the grace period, the rest fail with an error, exit status 0.
"""

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from weft.base.cancellation import cancel_and_wait
from weft.base.errors import UnavailableError, UnsupportedError, WeftError
from weft.base.observing import logs, telemetry
from weft.base.observing.watchdog import LoopWatchdog
from weft.base.processes.event_loop import new_event_loop
from weft.base.processes.malloc import keep_freed_memory
from weft.gateway.app import Gateway
from weft.gateway.arguments import fault_of, make_parser
from weft.gateway.http.allowed_hosts import AllowedHosts
from weft.gateway.http.endpoint import Handler
from weft.gateway.http.http_server import HttpServer, bound_socket
from weft.gateway.http.request_context import RequestContext, RequestTracker
from weft.gateway.http.resources import Limits, Resources
from weft.gateway.openai import ENDPOINTS
from weft.gateway.openai.chat_template import read_template
from weft.gateway.openai.models import Models
from weft.jobs.atomic_files import held
from weft.v2.client.channels import is_one_endpoint
from weft.v2.client.v2_client import V2Client
from weft.v2.security.channel import channel_security, is_local
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.listening import exposure, host_and_port
from weft.v2.server.metrics import DroppedLogsCollector, start_metrics_server
from weft.v2.server.server import stop_event

#: A router that was started again is noticed soon.
_RECONNECT_OPTIONS: list[tuple[str, Any]] = [("grpc.max_reconnect_backoff_ms", 500)]
#: Where a name resolves to several routers, they take turns, as only grpcio does it.
_BALANCING_OPTIONS = [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]
#: End of the grace period reserved for error responses to unfinished requests: seconds, and at most this share.
_CANCEL_S = 1.0
_MAX_CANCEL_SHARE = 0.25

#: Pause between two looks whether the process that is replaced has left the folder of batches, in seconds.
_LOOK_S = 0.2

_log = logs.get_logger("weft.gateway")


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped; returns the exit status: 0 stopped, 1 cannot serve, 2 invalid usage.

    An unreachable router does not end the process: ``/health`` and all requests fail in the meantime.
    """
    options = make_parser().parse_args(argv)
    if fault := fault_of(options):
        print(f"weft.gateway: error: {fault}", file=sys.stderr)  # noqa: T201  # before the log is set up
        return 2
    keep_freed_memory()
    logs.configure(options.log_level)
    try:
        telemetry.configure("weft.gateway")
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(options))
    except WeftError as error:
        _log.error("cannot serve: %s", error.message)
        return 1
    finally:
        telemetry.shutdown()
    return 0


async def _serve(options: argparse.Namespace) -> None:
    """Serve until stopped, then shut down gracefully. Raises a WeftError if it cannot start."""
    stop = stop_event(watch_stdin=options.stop_with_stdin)
    templates = {model: read_template(path) for model, path in options.chat_template}
    files = server_tls_files(options)
    tls = None if files is None else ServerTls(files)
    for warning in exposure(
        options.host,
        is_encrypted=tls is not None,
        asks_for_certificates=tls is not None and tls.requires_client_certificate,
        asks_for_keys=True,  # the router checks keys and warns itself
    ):
        _log.warning("%s", warning)
    router = V2Client(
        options.router,
        where="the router",  # its address is nothing for clients of the gateway
        options=_RECONNECT_OPTIONS if is_one_endpoint(options.router) else [*_RECONNECT_OPTIONS, *_BALANCING_OPTIONS],
        security=channel_security(options, "router-"),
        wire=options.wire,
    )
    watchdog = LoopWatchdog(abort_s=options.watchdog_abort_s)
    closing = contextlib.ExitStack()
    background: _Background | None = None
    try:
        limits = Limits(options.max_body_bytes, options.max_json_bytes, options.max_bytes_in_work, options.timeout_s)
        resources = closing.enter_context(contextlib.closing(Resources(router, limits)))
        if options.batch_dir is not None:
            background = _Background(options.batch_dir, resources, waits=options.take_over)
        routes = () if background is None else background.routes
        gateway = Gateway(resources, Models(router, templates), routes)
        hosts = AllowedHosts(options.allow_host) if is_local(options.host) else None
        calls = RequestTracker(gateway.app(), gateway.endpoint_of, options.forward_header, hosts)
        if background is not None:
            await background.start(calls)
        shares_ports = options.share_ports or options.take_over
        listening = bound_socket(options.host, options.port, shares_port=shares_ports)
        server = HttpServer(calls, tls, options.grace_s)
        await server.start(listening)
        try:
            metrics_port = start_metrics_server(
                lambda: (),
                options.host,
                options.metrics_port,
                (calls, watchdog, DroppedLogsCollector()),
                tls,
                shares_port=shares_ports,
            )
        except OSError as error:
            where = host_and_port(options.host, options.metrics_port)
            await server.stop()
            raise UnavailableError(f"cannot listen on {where}: {error}; choose another --metrics-port") from error
        endpoints = {
            "service": "gateway",
            "http": host_and_port(options.host, listening.getsockname()[1]),
            "metrics": host_and_port(options.host, metrics_port),
        }
        print(json.dumps(endpoints), file=sys.__stdout__, flush=True)  # the parent reads the ports from this line
        _log.info("serving", extra=endpoints)
        await stop.wait()
        _log.info("stopping", extra={"service": "gateway", "grace_s": options.grace_s})
        resources.is_draining = True
        cancel_s = min(_CANCEL_S, options.grace_s * _MAX_CANCEL_SHARE)
        asyncio.get_running_loop().call_later(options.grace_s - cancel_s, resources.stopping.set)
        await server.stop()
    finally:
        if background is not None:
            await background.close()
        closing.close()
        watchdog.close()
        await router.close()


class _Background:
    """Files and batches in a folder, and what runs them.

    Args:
        folder: Held by this process alone.
        resources: Shared with the other interfaces.
        waits: Begin once the process that is replaced has left the folder; until then clients are told to ask again.

    Attributes:
        routes: Their handlers.
    """

    def __init__(self, folder: Path, resources: Resources, *, waits: bool) -> None:
        try:
            from weft.gateway.batches.routes import Batches  # noqa: PLC0415  # pyarrow and a form parser are extras
            from weft.gateway.batches.runner import BackgroundRunner  # noqa: PLC0415
            from weft.gateway.batches.store import Store  # noqa: PLC0415
        except ModuleNotFoundError as error:
            raise UnsupportedError(f"--batch-dir needs '{error.name}': pip install 'weft-mesh[batches]'") from error
        self._path = folder
        self._folder = contextlib.ExitStack()
        self._beginning: asyncio.Task[None] | None = None
        self._waits = waits
        self._is_held = False
        try:
            if not waits:
                self._hold()
            store = Store(folder)
        except OSError as error:
            raise UnavailableError(f"--batch-dir: {error}") from error
        self._app: ASGIApp | None = None
        self._runner = BackgroundRunner(store, self._call)
        paths = [one.path for one in ENDPOINTS]
        routes = Batches(store, self._runner, resources, paths).routes()
        self.routes = [(method, path, self._when_held(handle)) for method, path, handle in routes]

    async def start(self, app: ASGIApp) -> None:
        """Go on with batches that are not finished; ``app`` answers their requests."""
        self._app = app
        if self._waits:
            self._beginning = asyncio.create_task(self._begin_when_free())
        else:
            await self._runner.resume()

    async def close(self) -> None:
        """Stop; batches go on at the next start."""
        if self._beginning is not None:
            await cancel_and_wait((self._beginning,))
        await self._runner.close()
        self._folder.close()

    def _hold(self) -> None:
        self._folder.enter_context(held(self._path))
        self._is_held = True

    async def _begin_when_free(self) -> None:
        while not self._is_held:
            with contextlib.suppress(UnavailableError):
                self._hold()
            await asyncio.sleep(_LOOK_S)
        await self._runner.resume()

    def _when_held(self, handle: Handler) -> Handler:
        async def checked(request: Request, context: RequestContext) -> ASGIApp:
            if not self._is_held:
                raise UnavailableError("the gateway before still ends what it does with files and batches; ask again")
            return await handle(request, context)

        return checked

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._app is not None:
            await self._app(scope, receive, send)
