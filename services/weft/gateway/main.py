"""The gateway process: start, serve, graceful shutdown.

Shutdown (SIGTERM, SIGINT, or end of standard input with ``--stop-with-stdin``): ``/health`` fails, no connection is
accepted, requests in flight get the grace period, the rest fail with an error, exit status 0.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Collection, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from weft import __version__
from weft.base.errors import RemoteError, UnavailableError, UnsupportedError, WeftError
from weft.base.observing import logs, telemetry
from weft.base.observing.watchdog import LoopWatchdog
from weft.base.processes.malloc import keep_freed_memory
from weft.base.security.arguments import add_channel_arguments, add_server_arguments, server_fault
from weft.base.text.argument_types import is_metadata_name, positive
from weft.gateway import anthropic, openapi
from weft.gateway.errors import RequestError, error_response, openai_body, v2_body
from weft.gateway.http.http_server import HttpServer, bound_socket
from weft.gateway.http.request_context import RequestContext, RequestTracker
from weft.gateway.http.resources import Limits, Resources, check_content_type
from weft.gateway.http.responding import Handler, endpoint, run_until_disconnect
from weft.gateway.json_text import is_large
from weft.gateway.openai import ENDPOINTS as OPENAI_ENDPOINTS
from weft.gateway.openai import adapters
from weft.gateway.openai.chat_template import read_template
from weft.gateway.openai.endpoint import Endpoint, EndpointCall, Models, ServedModel, no_such_model
from weft.gateway.openai.text_request import TIMEOUT_HEADER
from weft.gateway.ui.routes import PREFIX as PAGE
from weft.gateway.ui.routes import page_routes
from weft.gateway.v2 import routes as v2
from weft.v2.client.channels import is_one_endpoint
from weft.v2.client.v2_client import V2Client
from weft.v2.client.wires import add_wire_argument
from weft.v2.security.channel import channel_security, is_local
from weft.v2.security.tls import ServerTls, server_tls_files
from weft.v2.server.arguments import add_process_arguments
from weft.v2.server.listening import exposure, host_and_port
from weft.v2.server.metrics import CertificateCollector, DroppedLogsCollector, make_registry, serve_metrics
from weft.v2.server.model_metrics import ModelMetricsCollector, add_metrics_from_argument
from weft.v2.server.server import new_event_loop, stop_event

if TYPE_CHECKING:
    from weft.gateway.batches.routes import Batches


#: What is served, and offered for batches.
ENDPOINTS: tuple[Endpoint, ...] = (*OPENAI_ENDPOINTS, *anthropic.ENDPOINTS)
MODELS = "/v1/models"
HEALTH = "/health"
VERSION = "/version"
#: Beside them with ``--probes``.
PING, METRICS = "/ping", "/metrics"
#: How long the router has for a health check, in seconds.
HEALTH_TIMEOUT_S = 2.0
#: Response header with the names of fields that had no effect.
IGNORED_HEADER = "x-weft-ignored-fields"
_MAX_LOGGED_FIELDS = 256
#: Prefixes of what runs in the background.
_BACKGROUND = ("/v1/files", "/v1/batches")


class Gateway:
    """Serves HTTP requests by calling the router; create it on the event loop that it runs on.

    Args:
        more_routes: Handlers of further routes, by method and path.
        is_strict: Whether unknown fields of their bodies are refused.
        registry: Metrics that are offered here too, with ``/ping``.
        pages: Routes of the page, which are no part of the interfaces.
    """

    def __init__(
        self,
        resources: Resources,
        models: Models,
        more_routes: Sequence[tuple[str, str, Handler]] = (),
        endpoints: Sequence[Endpoint] = ENDPOINTS,
        *,
        is_strict: bool = False,
        registry: CollectorRegistry | None = None,
        pages: Sequence[Route] = (),
    ) -> None:
        self._registry = registry
        self._pages = pages
        self._resources = resources
        self._models = models
        self._more_routes = more_routes
        self._endpoints = endpoints
        self._is_strict = is_strict
        self._logged_fields: set[str] = set()
        self._kinds = tuple(dict.fromkeys(one.model_kind for one in endpoints))
        self._paths = frozenset(
            (MODELS, HEALTH, VERSION, PING, METRICS, openapi.PATH, *(one.path for one in endpoints))
        )
        self._routes: list[Route] = []
        self._document = b""
        self._created = int(time.time())

    def app(self) -> Starlette:
        """The ASGI application with all routes."""
        handlers: list[tuple[str, str, Handler]] = [
            ("GET", MODELS, self._list),
            ("GET", MODELS + "/{name:path}", self._model),
            ("GET", HEALTH, self._health),
            ("GET", VERSION, self._version),
            ("GET", openapi.PATH, self._openapi),
            *self._more_routes,
        ]
        if self._registry is not None:
            handlers += [("GET", PING, self._health), ("GET", METRICS, partial(_metrics, self._registry))]
        routes = [Route(path, endpoint(handle, error_response), methods=[method]) for method, path, handle in handlers]
        routes += [
            Route(
                one.path, endpoint(self._handler(one), partial(error_response, body=one.error_body)), methods=["POST"]
            )
            for one in self._endpoints
        ]
        self._routes += [*routes, *v2.routes(self._resources)]
        app = Starlette(routes=[*self._routes, *self._pages], exception_handlers={HTTPException: self._unknown_route})
        app.router.redirect_slashes = False
        return app

    def endpoint_of(self, path: str) -> str:
        """Name of the endpoint of a path, for metrics and spans."""
        if path.startswith(_BACKGROUND):
            return next(prefix for prefix in _BACKGROUND if path.startswith(prefix))
        if self._pages and path.startswith(PAGE):
            return PAGE
        return path if path in self._paths else v2.endpoint_of(path) or "/other"

    def _handler(self, served: Endpoint) -> Handler:
        async def handle(request: Request, context: RequestContext) -> ASGIApp:
            check_content_type(request)
            limits = self._resources.limits
            max_bytes = min(limits.max_body_bytes, limits.max_json_bytes)
            body = b"".join(await self._resources.body(request, context, max_bytes))

            async def respond() -> ASGIApp:
                headers = {TIMEOUT_HEADER: context.headers.get(TIMEOUT_HEADER, "")}
                parsed, ignored = await self._resources.run(
                    context, is_large(body), served.read, body, headers, is_strict=self._is_strict
                )
                if served.operation:
                    context.name_span(served.operation, parsed.model)
                if ignored:
                    context.response_headers[IGNORED_HEADER] = ", ".join(ignored)
                    self._log_ignored(ignored, served.path)
                model = await self._models.find(served.model_kind, parsed.model, context.identity())
                response = await served.respond(parsed, model, EndpointCall(self._resources, context))
                if served.model_kind is adapters.AdapterModel:
                    self._models.forget_adapters()
                return response

            return await run_until_disconnect(request.receive, self._resources.stopping, respond())

        return handle

    def _log_ignored(self, names: Sequence[str], path: str) -> None:
        """Log each name once, and at most ``_MAX_LOGGED_FIELDS`` of them."""
        for name in names:
            if name not in self._logged_fields and len(self._logged_fields) < _MAX_LOGGED_FIELDS:
                self._logged_fields.add(name)
                _log.warning("the field '%s' of %s has no effect; logged once", name, path)

    async def _list(self, _request: Request, context: RequestContext) -> ASGIApp:
        return JSONResponse({"object": "list", "data": list((await self._objects(context)).values())})

    async def _model(self, request: Request, context: RequestContext) -> ASGIApp:
        name, objects = request.path_params["name"], await self._objects(context)
        base, _, adapter = name.rpartition(":")
        if name not in objects and objects.get(adapter, {}).get("parent") == base:
            objects[name] = objects[adapter] | {"id": name}
        if name not in objects:
            raise no_such_model(name)
        return JSONResponse(objects[name])

    async def _objects(self, context: RequestContext) -> dict[str, dict[str, Any]]:
        """What is listed, models and their adapters, by name."""
        models = await self._models.listed(self._kinds, context.identity())
        adapters = await self._models.adapters(models, context.identity())
        objects = {name: self._model_object(name, kinds) for name, kinds in models.items()}
        for name, (model, path) in adapters.items():
            objects[name] = objects[model] | {"id": name, "root": path, "parent": model}
        return objects

    async def _health(self, _request: Request, _call: RequestContext) -> ASGIApp:
        if self._resources.is_draining:
            raise UnavailableError("the gateway stops")
        with contextlib.suppress(RemoteError):
            if await self._resources.router.is_serving(timeout_s=HEALTH_TIMEOUT_S):
                return JSONResponse({"status": "ok"})
        raise UnavailableError("the router does not report SERVING")

    async def _version(self, _request: Request, _call: RequestContext) -> ASGIApp:
        return JSONResponse({"version": __version__})

    async def _openapi(self, _request: Request, _call: RequestContext) -> ASGIApp:
        if not self._document:
            self._document = await asyncio.to_thread(openapi.encoded, self._routes, self._endpoints)
        return Response(self._document, media_type="application/json")

    def _model_object(self, name: str, kinds: Collection[type[ServedModel]]) -> dict[str, Any]:
        paths = [one.path for one in self._endpoints if one.model_kind in kinds]
        return {"id": name, "object": "model", "created": self._created, "owned_by": "weft", "endpoints": paths}

    async def _unknown_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        is_v2 = bool(v2.endpoint_of(request.url.path))
        near = next((one for one in self._endpoints if f"{request.url.path}/".startswith(f"{one.path}/")), None)
        offered = f"GET {openapi.PATH} for what is"
        if near and near.nothing_below:
            offered = f"POST {near.path}: {near.nothing_below}"
        if request.url.path.startswith(_BACKGROUND):
            offered = "--batch-dir of the gateway, which turns files and batches on"
        what = f"{request.method} {request.url.path[:80]} is not offered; see {offered}"
        refused = RequestError(what, code="unknown_url", http_status=status)
        refusal = error_response(refused, v2_body if is_v2 else near.error_body if near else openai_body)
        if status == HTTPStatus.METHOD_NOT_ALLOWED:  # starlette names those of the first route of this path
            methods = {name for one in self._routes if one.path_regex.match(request.url.path) for name in one.methods}
            refusal.headers["allow"] = ", ".join(sorted(methods))
        return refusal


async def _metrics(registry: CollectorRegistry, _request: Request, _call: RequestContext) -> ASGIApp:
    return Response(await asyncio.to_thread(generate_latest, registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


DEFAULT_PORT = 8000
DEFAULT_METRICS_PORT = 8003
#: Limits in bytes: option, default, help.
_SIZES = (
    ("max_body_bytes", 64 << 20, "largest body"),
    ("max_json_bytes", 16 << 20, "most JSON in a body; the rest may be binary tensors"),
    ("max_bytes_in_work", 256 << 20, "bodies of all requests in work; more are refused with 429"),
)


def make_parser() -> argparse.ArgumentParser:
    """The argument parser."""
    parser = argparse.ArgumentParser(
        prog="weft.gateway", description="Serve V2 over HTTP and OpenAI's interface in front of a router."
    )
    parser.add_argument("--router", required=True, metavar="ADDRESS", help="the router, for example 127.0.0.1:8001")
    add_process_arguments(parser, metrics_port=DEFAULT_METRICS_PORT)
    add_metrics_from_argument(parser)
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, help="of HTTP; 0: chosen by the system (default %(default)s)"
    )
    parser.add_argument(
        "--chat-template",
        type=_template,
        action="append",
        default=[],
        metavar="MODEL=FILE",
        help="chat template of a model in place of its own; may be repeated",
    )
    parser.add_argument(
        "--strict-fields",
        action="store_true",
        help=f"refuse unknown fields in bodies of OpenAI's and Anthropic's interfaces, else listed in {IGNORED_HEADER}",
    )
    parser.add_argument(
        "--probes", action="store_true", help=f"offer {METRICS} and {PING} on --port too, where load balancers look"
    )
    parser.add_argument(
        "--allow-runtime-lora",
        action="store_true",
        help="offer /v1/load_lora_adapter and /v1/unload_lora_adapter to all who may call a model",
    )
    parser.add_argument(
        "--timeout-s",
        type=positive,
        default=600.0,
        metavar="N",
        help="longest time for an answer, whatever a request asks for (default %(default)g)",
    )
    for name, default, text in _SIZES:
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, metavar="N", help=f"{text} (default %(default)s)")
    parser.add_argument(
        "--forward-header",
        type=_header,
        action="append",
        default=[],
        metavar="NAME",
        help="HTTP header that goes on to the router as metadata, for example x-client-id; may be repeated",
    )
    parser.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="with --ui or a loopback --host: a name, besides localhost, in the header 'host' of requests, as behind a "
        "proxy; * allows all; may be repeated",
    )
    parser.add_argument(
        "--batch-dir",
        type=Path,
        metavar="DIR",
        help="folder of OpenAI's files and batches, held by one gateway; default: neither is offered",
    )
    parser.add_argument(
        "--ui", action="store_true", help="serve the page of graphs and of the services of --metrics-from, at /ui/"
    )
    parser.add_argument("--jaeger-url", default="", metavar="URL", help="where the page's links to traces lead")
    add_wire_argument(parser)
    add_server_arguments(parser.add_argument_group("security of its own ports"), takes_keys=False)
    called = parser.add_argument_group("security of its calls; keys are those of its clients")
    add_channel_arguments(called, "router-", "the router", takes_key=False)
    return parser


def fault_of(options: argparse.Namespace) -> str:
    """Error message for inconsistent arguments; "" if they are valid."""
    if fault := server_fault(options):
        return fault
    for name, *_ in _SIZES:
        if getattr(options, name) < 1:
            return f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}"
    if options.max_bytes_in_work < options.max_body_bytes:
        return (
            f"--max-bytes-in-work {options.max_bytes_in_work} is less than --max-body-bytes {options.max_body_bytes}, "
            "so that no body of that size would ever be taken; raise it, or lower --max-body-bytes"
        )
    models = [model for model, _ in options.chat_template]
    if len(models) != len(set(models)):
        return f"--chat-template: each model may be given once, got {', '.join(models)}"
    return ""


def _template(text: str) -> tuple[str, Path]:
    model, separator, path = text.partition("=")
    if not (model and separator and path):
        raise argparse.ArgumentTypeError(f"'{text}' is not of the form MODEL=FILE")
    return model, Path(path)


def _header(text: str) -> str:
    name = text.lower()
    if not is_metadata_name(name):
        raise argparse.ArgumentTypeError(f"'{text}' cannot be metadata: a name is of letters, digits, '-', '_' and '.'")
    return name


#: A router that was started again is noticed soon.
_RECONNECT_OPTIONS: list[tuple[str, Any]] = [("grpc.max_reconnect_backoff_ms", 500)]
#: Where a name resolves to several routers, they take turns, as only grpcio does it.
_BALANCING_OPTIONS = [("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}')]
#: End of the grace period reserved for error responses to unfinished requests: seconds, and at most this share.
_CANCEL_S = 1.0
_MAX_CANCEL_SHARE = 0.25

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
    logs.configure(options.log_level, "gateway")
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
    batches: Batches | None = None
    try:
        limits = Limits(options.max_body_bytes, options.max_json_bytes, options.max_bytes_in_work, options.timeout_s)
        resources = closing.enter_context(contextlib.closing(Resources(router, limits)))
        if options.batch_dir is not None:
            batches = _batches(options, resources)
        registry = make_registry(
            lambda: (),
            (
                watchdog,
                DroppedLogsCollector(),
                CertificateCollector(options),
                ModelMetricsCollector(options.metrics_from),
            ),
        )
        gateway = Gateway(
            resources,
            Models(router, templates),
            () if batches is None else batches.routes(),
            (*ENDPOINTS, *adapters.ENDPOINTS) if options.allow_runtime_lora else ENDPOINTS,
            is_strict=options.strict_fields,
            registry=registry if options.probes else None,
            pages=page_routes(resources, options.metrics_from, options.jaeger_url) if options.ui else (),
        )
        hosts = [*options.allow_host, options.host] if options.ui or is_local(options.host) else None
        calls = RequestTracker(gateway.app(), gateway.endpoint_of, options.forward_header, hosts)
        registry.register(calls)
        if batches is not None:
            await batches.start(calls)
        shares_ports = options.share_ports or options.take_over
        listening = bound_socket(options.host, options.port, shares_port=shares_ports)
        server = HttpServer(calls, tls, options.grace_s)
        await server.start(listening)
        try:
            metrics_port = serve_metrics(registry, options.host, options.metrics_port, tls, shares_port=shares_ports)
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
        if resources.stopping.is_set():  # what was in work then was answered with an error
            print(
                json.dumps({"lost": f"requests that took longer than {options.grace_s:g} s"}),
                file=sys.__stdout__,
                flush=True,
            )
    finally:
        if batches is not None:
            await batches.close()
        closing.close()
        watchdog.close()
        await router.close()


def _batches(options: argparse.Namespace, resources: Resources) -> "Batches":
    try:
        from weft.gateway.batches.routes import Batches  # noqa: PLC0415  # pyarrow and a form parser are extras
    except ModuleNotFoundError as error:
        raise UnsupportedError(f"--batch-dir needs '{error.name}': pip install 'weft-mesh[jobs]'") from error
    return Batches(options.batch_dir, resources, [one.path for one in ENDPOINTS], waits=options.take_over)
