"""V2's routes over HTTP, except inference: each converts JSON to a message, calls the router, and back."""

import base64
import binascii
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from weft.base.errors import RemoteError
from weft.gateway.errors import RequestError, error_response, v2_body
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources, check_origin
from weft.gateway.http.responding import Handler, endpoint, run_until_disconnect
from weft.gateway.json_text import is_large, json_type, parse_json, whole
from weft.gateway.v2.inference import InferenceHandlers
from weft.v2.protocol.encoding import fill_parameters
from weft.v2.server.servicer import change_settings
from weft_protos import grpc_service_pb2 as pb

_FILE_PREFIX = "file:"
#: What this interface adds to the extensions of the server behind it.
_EXTENSIONS = ("binary_tensor_data", "generate")


def to_json(message: Message) -> dict[str, Any]:
    """A message in Triton Inference Server's JSON: protobuf field names, every field, integers as numbers.

    Unset message fields and oneof members are left out; bytes are base64.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            inner = field.message_type.fields_by_name["value"]
            fields[field.name] = {str(key): _plain(inner, value[key]) for key in value}
        elif field.is_repeated:
            fields[field.name] = [_plain(field, item) for item in value]
        elif not field.has_presence or message.HasField(field.name):
            fields[field.name] = _plain(field, value)
    return fields


def _plain(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return to_json(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def server_json(response: pb.ServerMetadataResponse) -> dict[str, Any]:
    """Name, version and extensions."""
    fields = to_json(response)
    return fields | {"extensions": [*fields["extensions"], *_EXTENSIONS]}


def index_request(_: str, body: dict[str, Any]) -> pb.RepositoryIndexRequest:
    """The request for the state of each model version. Raises RequestError."""
    ready = body.get("ready", False)
    if not isinstance(ready, bool):
        raise RequestError(f"'ready' must be true or false, got {ready!r:.40}", param="ready")
    return pb.RepositoryIndexRequest(ready=ready)


def load_request(name: str, body: dict[str, Any]) -> pb.RepositoryModelLoadRequest:
    """The request to load a model; files are base64. Raises RequestError."""
    request = pb.RepositoryModelLoadRequest(model_name=name)
    parameters = _parameters(body)
    for key in [key for key in parameters if key.startswith(_FILE_PREFIX)]:
        content = parameters.pop(key)
        try:
            request.parameters[key].bytes_param = base64.b64decode(content, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise RequestError(f"parameter '{key[:80]}' must be the content of a file in base64") from None
    fill_parameters(request.parameters, parameters)
    return request


def unload_request(name: str, body: dict[str, Any]) -> pb.RepositoryModelUnloadRequest:
    """The request to unload a model. Raises RequestError."""
    request = pb.RepositoryModelUnloadRequest(model_name=name)
    fill_parameters(request.parameters, _parameters(body))
    return request


def _parameters(body: dict[str, Any]) -> dict[str, Any]:
    parameters = body.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise RequestError(f"'parameters' must be an object, got {json_type(parameters)}", param="parameters")
    return dict(parameters)


def system_request(name: str, body: dict[str, Any]) -> pb.SystemSharedMemoryRegisterRequest:
    """The request to register a region of system shared memory. Raises RequestError."""
    try:
        return pb.SystemSharedMemoryRegisterRequest(
            name=name, key=body["key"], offset=body.get("offset", 0), byte_size=body["byte_size"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _unfit("'key', a string, and 'byte_size' and 'offset', numbers of bytes", error) from None


def cuda_request(name: str, body: dict[str, Any]) -> pb.CudaSharedMemoryRegisterRequest:
    """The request to register a region of CUDA shared memory. Raises RequestError."""
    try:
        handle = base64.b64decode(body["raw_handle"]["b64"])
        return pb.CudaSharedMemoryRegisterRequest(
            name=name, raw_handle=handle, device_id=body["device_id"], byte_size=body["byte_size"]
        )
    except (KeyError, TypeError, ValueError) as error:
        wanted = "'raw_handle', an object with the handle in base64 as 'b64', and 'device_id' and 'byte_size', numbers"
        raise _unfit(wanted, error) from None


def _unfit(wanted: str, error: Exception) -> RequestError:
    return RequestError(f"the body must have {wanted}: {type(error).__name__} {error}")


def trace_request(name: str, body: dict[str, Any]) -> pb.TraceSettingRequest:
    """The request to change trace settings, or with an empty body to read them; null: the default."""
    request = pb.TraceSettingRequest(model_name=name)
    for key, value in body.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        texts = (str(item).lower() if isinstance(item, bool) else str(item) for item in values)
        request.settings[key].value.extend(whole(text, key) for text in texts)
    return request


def trace_json(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """Trace settings; only the level has several values."""
    return {
        key: list(setting.value) if key == "trace_level" else next(iter(setting.value), "")
        for key, setting in response.settings.items()
    }


def log_request(_: str, body: dict[str, Any]) -> pb.LogSettingsRequest:
    """The request to change log settings, or with an empty body to read them. Raises RequestError."""
    request = pb.LogSettingsRequest()
    for key, value in body.items():
        target = request.settings[key]
        if isinstance(value, bool):
            target.bool_param = value
        elif isinstance(value, int) and 0 <= value < 1 << 32:
            target.uint32_param = value
        elif isinstance(value, str):
            target.string_param = whole(value, key)
        else:
            raise RequestError(f"'{key[:80]}' must be true or false, a number from 0 on, or a string", param=key)
    return request


def log_json(response: pb.LogSettingsResponse) -> dict[str, Any]:
    """Log settings."""
    return {
        key: getattr(setting, setting.WhichOneof("parameter_choice") or "string_param")
        for key, setting in response.settings.items()
    }


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


#: The first path that matches counts.
CALLS = (
    _Call("GET", ("",), "ServerMetadata", server_json),
    _Call("GET", ("/models/stats", *(model + "/stats" for model in _VERSIONS)), "ModelStatistics", to_json),
    _Call("GET", _VERSIONS, "ModelMetadata", to_json),
    _Call("GET", [model + "/config" for model in _VERSIONS], "ModelConfig", _config),
    _Call("GET", _TRACE, "TraceSetting", trace_json, trace_request),
    _Call("POST", _TRACE, "TraceSetting", trace_json, trace_request),
    _Call("GET", ("/logging",), "LogSettings", log_json, log_request),
    _Call("POST", ("/logging",), "LogSettings", log_json, log_request),
    _Call("POST", ("/repository/index",), "RepositoryIndex", _index, index_request),
    _Call("POST", (f"/repository{_MODEL}/load",), "RepositoryModelLoad", _nothing, load_request, True),
    _Call("POST", (f"/repository{_MODEL}/unload",), "RepositoryModelUnload", _nothing, unload_request, True),
    _Call("GET", [f"{_SYSTEM}{one}/status" for one in _REGIONS], "SystemSharedMemoryStatus", _regions),
    _Call("GET", [f"{_CUDA}{one}/status" for one in _REGIONS], "CudaSharedMemoryStatus", _regions),
    _Call("POST", (f"{_SYSTEM}{_REGIONS[1]}/register",), "SystemSharedMemoryRegister", _nothing, system_request),
    _Call("POST", (f"{_CUDA}{_REGIONS[1]}/register",), "CudaSharedMemoryRegister", _nothing, cuda_request),
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
        *((call.method, path, _handler(call, resources)) for call in CALLS for path in call.paths),
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
    """Endpoint name of a path, for metrics and spans; "" if it is not a path of V2."""
    if path != PREFIX and not path.startswith(PREFIX + "/"):
        return ""
    last = path.rpartition("/")[2]
    return f"{PREFIX}/{last}" if last in _NAMED else PREFIX


def _error(error: Any) -> JSONResponse:
    return error_response(error, v2_body)


async def _live(_request: Request, _context: RequestContext) -> ASGIApp:
    return JSONResponse({"live": True})


def _checked(handle: Handler) -> Handler:
    """Wrap a handler: allow API clients and pages of this origin only."""

    async def checked(request: Request, context: RequestContext) -> ASGIApp:
        check_origin(request)
        return await handle(request, context)

    return checked


def _made(make: Callable[[str, dict[str, Any]], Message], name: str, data: bytes) -> bytes:
    """The request, in bytes, of a body, which is a JSON object or nothing; another process may run it."""
    return make(name, parse_json(data) if data.strip() else {}).SerializeToString()


def _handler(served: _Call, resources: Resources) -> Handler:
    async def handle(request: Request, context: RequestContext) -> ASGIApp:
        path, data = request.path_params, b""
        if served.make is None:
            wanted = getattr(pb, served.rpc + "Request")(**path)
        else:
            if served.method == "POST":  # with a JSON object, or nothing
                data = b"".join(await resources.body(request, context, resources.limits.max_json_bytes))
            made = await resources.run(context, is_large(data), _made, served.make, path.get("name", ""), data)
            wanted = getattr(pb, served.rpc + "Request").FromString(made)
        timeout_s = resources.limits.timeout_s if served.is_long else CALL_TIMEOUT_S
        call = resources.router.call(served.rpc, wanted, timeout_s=timeout_s, metadata=context.metadata())
        if served.is_long:
            call = run_until_disconnect(request.receive, resources.stopping, call)
        answer = await call
        if isinstance(wanted, pb.TraceSettingRequest | pb.LogSettingsRequest):  # the router took them
            change_settings(wanted)
        return JSONResponse(served.show(answer))

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
    """200, or 503, also where there is no such model."""

    async def model_ready(request: Request, context: RequestContext) -> ASGIApp:
        wanted, metadata = pb.ModelReadyRequest(**request.path_params), context.metadata()
        response = await resources.router.call("ModelReady", wanted, timeout_s=CALL_TIMEOUT_S, metadata=metadata)
        return JSONResponse({"name": wanted.name, "ready": response.ready}, 200 if response.ready else 503)

    return model_ready
