"""Paths of V2: the calls of the router behind each, but for inference."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.base.errors import RemoteError
from weft.gateway.errors import error_response, v2_body
from weft.gateway.http.body import check_origin
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.http.responding import Handler, endpoint, run_until_disconnect
from weft.gateway.json_text import is_large, parse_json
from weft.gateway.v2 import control
from weft.gateway.v2.control import to_json
from weft.gateway.v2.inference import InferenceHandlers
from weft_protos import grpc_service_pb2 as pb

PREFIX = "/v2"
#: What metrics and spans tell apart.
_NAMED = ("infer", "generate", "generate_stream")
#: How long the router has for a probe, and for anything else that does not load a model, in seconds.
PROBE_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 10.0

_MODEL = "/models/{name}"
_VERSIONS = (_MODEL, _MODEL + "/versions/{version}")
_SYSTEM, _CUDA = "/systemsharedmemory", "/cudasharedmemory"
_REGIONS = ("", "/region/{name}")
_TRACE = ("/trace/setting", _MODEL + "/trace/setting")


class _Call(NamedTuple):
    """Paths that are a call of the router with the client's key.

    Attributes:
        show: The JSON of the response.
        make: The request, of the name in the path and the body; None: it has the fields of the path.
        is_long: It may take as long as an inference; a client that leaves cancels it.
    """

    method: str
    paths: Sequence[str]
    rpc: str
    show: Callable[[Any], Any]
    make: Callable[[str, dict[str, Any]], Message] | None = None
    is_long: bool = False


def _nothing(_: Message) -> dict[str, Any]:
    return {}


def _config(response: pb.ModelConfigResponse) -> dict[str, Any]:
    return to_json(response.config)


def _regions(response: Any) -> list[dict[str, Any]]:
    return [to_json(region) for region in response.regions.values()]


def _index(response: pb.RepositoryIndexResponse) -> list[dict[str, Any]]:
    return [{name: value for name, value in to_json(entry).items() if value} for entry in response.models]


def _logging(_: str, body: dict[str, Any]) -> Message:
    return control.log_request(body)


#: The first path that matches counts.
_CALLS = (
    _Call("GET", ("",), "ServerMetadata", control.server_json),
    _Call("GET", ("/models/stats", *(model + "/stats" for model in _VERSIONS)), "ModelStatistics", to_json),
    _Call("GET", _VERSIONS, "ModelMetadata", to_json),
    _Call("GET", [model + "/config" for model in _VERSIONS], "ModelConfig", _config),
    _Call("GET", _TRACE, "TraceSetting", control.trace_json, control.trace_request),
    _Call("POST", _TRACE, "TraceSetting", control.trace_json, control.trace_request),
    _Call("GET", ("/logging",), "LogSettings", control.log_json, _logging),
    _Call("POST", ("/logging",), "LogSettings", control.log_json, _logging),
    _Call("POST", ("/repository/index",), "RepositoryIndex", _index, lambda _, body: control.index_request(body)),
    _Call("POST", (f"/repository{_MODEL}/load",), "RepositoryModelLoad", _nothing, control.load_request, True),
    _Call("POST", (f"/repository{_MODEL}/unload",), "RepositoryModelUnload", _nothing, control.unload_request, True),
    _Call("GET", [f"{_SYSTEM}{one}/status" for one in _REGIONS], "SystemSharedMemoryStatus", _regions),
    _Call("GET", [f"{_CUDA}{one}/status" for one in _REGIONS], "CudaSharedMemoryStatus", _regions),
    _Call(
        "POST", (f"{_SYSTEM}{_REGIONS[1]}/register",), "SystemSharedMemoryRegister", _nothing, control.system_request
    ),
    _Call("POST", (f"{_CUDA}{_REGIONS[1]}/register",), "CudaSharedMemoryRegister", _nothing, control.cuda_request),
    _Call("POST", [f"{_SYSTEM}{one}/unregister" for one in _REGIONS], "SystemSharedMemoryUnregister", _nothing),
    _Call("POST", [f"{_CUDA}{one}/unregister" for one in _REGIONS], "CudaSharedMemoryUnregister", _nothing),
)


def routes(resources: Resources) -> list[Route]:
    """The routes, each with its handler."""
    inference = InferenceHandlers(resources)
    handlers: list[tuple[str, str, Handler]] = [
        ("GET", "/health/live", _live),  # whatever is behind the gateway
        ("GET", "/health/ready", _ready(resources)),
        *(("GET", model + "/ready", _model_ready(resources)) for model in _VERSIONS),
        *((call.method, path, _handler(call, resources)) for call in _CALLS for path in call.paths),
    ]
    for model in _VERSIONS:
        handlers += [
            ("POST", model + "/infer", inference.infer),
            ("POST", model + "/generate", inference.generate),
            ("POST", model + "/generate_stream", inference.generate_stream),
        ]
    return [
        Route(PREFIX + path, endpoint(_checked(handle) if method == "POST" else handle, _error), methods=[method])
        for method, path, handle in handlers
    ]


def endpoint_of(path: str) -> str:
    """Name of the endpoint of a path for metrics and spans; "": the path is none of V2."""
    if path != PREFIX and not path.startswith(PREFIX + "/"):
        return ""
    last = path.rpartition("/")[2]
    return f"{PREFIX}/{last}" if last in _NAMED else PREFIX


def _error(error: Any) -> JSONResponse:
    return error_response(error, v2_body)


async def _live(_request: Request, _context: RequestContext) -> ASGIApp:
    return JSONResponse({"live": True})


def _checked(handle: Handler) -> Handler:
    """The handler, for clients alone and pages of this origin."""

    async def checked(request: Request, context: RequestContext) -> ASGIApp:
        check_origin(request)
        return await handle(request, context)

    return checked


def _handler(served: _Call, resources: Resources) -> Handler:
    async def handle(request: Request, context: RequestContext) -> ASGIApp:
        path, body = request.path_params, {}
        if served.make is None:
            wanted = getattr(pb, served.rpc + "Request")(**path)
        else:
            if served.method == "POST":  # with a JSON object, or nothing
                data = b"".join(await resources.body(request, context, resources.limits.max_json_bytes))
                body = await resources.run(context, is_large(data), parse_json, data) if data.strip() else {}
            wanted = served.make(path.get("name", ""), body)
        timeout_s = resources.limits.timeout_s if served.is_long else CALL_TIMEOUT_S
        call = resources.router.call(served.rpc, wanted, timeout_s=timeout_s, metadata=context.metadata())
        if served.is_long:
            call = run_until_disconnect(request.receive, resources.stopping, call)
        return JSONResponse(served.show(await call))

    return handle


def _ready(resources: Resources) -> Handler:
    """Whether every model is ready: 200 or 503."""

    async def ready(_request: Request, _context: RequestContext) -> ASGIApp:
        is_ready = False
        if not resources.is_draining:
            with contextlib.suppress(RemoteError):
                is_ready = await resources.router.is_ready(timeout_s=PROBE_TIMEOUT_S)
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    return ready


def _model_ready(resources: Resources) -> Handler:
    """200 or 503; 404: there is no such model."""

    async def model_ready(request: Request, context: RequestContext) -> ASGIApp:
        wanted, metadata = pb.ModelReadyRequest(**request.path_params), context.metadata()
        response = await resources.router.call("ModelReady", wanted, timeout_s=CALL_TIMEOUT_S, metadata=metadata)
        return JSONResponse({"name": wanted.name, "ready": response.ready}, 200 if response.ready else 503)

    return model_ready
