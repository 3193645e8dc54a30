"""Everything but inference: health, metadata, statistics, the repository, shared memory, settings."""

import base64
import binascii
from collections.abc import Callable
from typing import Any

from google.protobuf.message import Message
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp

from weft.base.errors import RemoteError
from weft.gateway.errors import RequestError
from weft.gateway.http.disconnect import run_until_disconnect
from weft.gateway.http.request_context import RequestContext
from weft.gateway.http.resources import Resources
from weft.gateway.json_text import is_large, json_type, parse_json, whole
from weft.v2.protocol.encoding import fill_parameters
from weft_protos import grpc_service_pb2 as pb

_FILE_PREFIX = "file:"


def to_json(message: Message) -> dict[str, Any]:
    """A message as Triton Inference Server writes it: names of the protocol, every field, integers as numbers.

    Message fields and members of a oneof that are not set are left out; bytes are base64.
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


def trace_request(name: str, body: dict[str, Any]) -> pb.TraceSettingRequest:
    """The request to change trace settings, or with an empty body to read them; null: the default."""
    request = pb.TraceSettingRequest(model_name=name)
    for key, value in body.items():
        values = value if isinstance(value, list) else [] if value is None else [value]
        request.settings[key].value.extend(whole(_text(item), key) for item in values)
    return request


def log_request(body: dict[str, Any]) -> pb.LogSettingsRequest:
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


def trace_json(response: pb.TraceSettingResponse) -> dict[str, Any]:
    """Trace settings; only the level has several values."""
    return {
        key: list(setting.value) if key == "trace_level" else next(iter(setting.value), "")
        for key, setting in response.settings.items()
    }


def log_json(response: pb.LogSettingsResponse) -> dict[str, Any]:
    """Log settings."""
    return {
        key: getattr(setting, setting.WhichOneof("parameter_choice") or "string_param")
        for key, setting in response.settings.items()
    }


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


#: How long the router has for a probe, and for anything else that does not load a model, in seconds.
PROBE_TIMEOUT_S = 2.0
CALL_TIMEOUT_S = 10.0
#: What this interface adds to the extensions of the server behind it.
_EXTENSIONS = ("binary_tensor_data", "generate")


class ControlHandlers:
    """Handlers of everything but inference; each is a call of the router with the client's key.

    Args:
        resources: Shared with the other interfaces.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources

    async def live(self, _request: Request, _context: RequestContext) -> ASGIApp:
        """The gateway lives; what is behind it does not matter."""
        return JSONResponse({"live": True})

    async def ready(self, _request: Request, _context: RequestContext) -> ASGIApp:
        """Whether every model is ready: 200 or 503."""
        is_ready = False
        if not self._resources.is_draining:
            try:
                is_ready = await self._resources.router.is_ready(timeout_s=PROBE_TIMEOUT_S)
            except RemoteError:
                is_ready = False
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def model_ready(self, request: Request, context: RequestContext) -> ASGIApp:
        """200 or 503; 404: there is no such model."""
        name, version = _model(request)
        response = await self._call(context, "ModelReady", pb.ModelReadyRequest(name=name, version=version))
        return JSONResponse({"name": name, "ready": response.ready}, 200 if response.ready else 503)

    async def server(self, _request: Request, context: RequestContext) -> ASGIApp:
        """Name, version and extensions."""
        response = await self._call(context, "ServerMetadata", pb.ServerMetadataRequest())
        fields = to_json(response)
        return JSONResponse(fields | {"extensions": [*fields["extensions"], *_EXTENSIONS]})

    async def model(self, request: Request, context: RequestContext) -> ASGIApp:
        """Inputs and outputs of a model."""
        name, version = _model(request)
        wanted = pb.ModelMetadataRequest(name=name, version=version)
        return JSONResponse(to_json(await self._call(context, "ModelMetadata", wanted)))

    async def config(self, request: Request, context: RequestContext) -> ASGIApp:
        """Configuration of a model."""
        name, version = _model(request)
        response = await self._call(context, "ModelConfig", pb.ModelConfigRequest(name=name, version=version))
        return JSONResponse(to_json(response.config))

    async def statistics(self, request: Request, context: RequestContext) -> ASGIApp:
        """Counters of a model, or of all."""
        name, version = _model(request)
        wanted = pb.ModelStatisticsRequest(name=name, version=version)
        return JSONResponse(to_json(await self._call(context, "ModelStatistics", wanted)))

    async def index(self, request: Request, context: RequestContext) -> ASGIApp:
        """State of each model version."""
        body = await self._json(request, context)
        ready = body.get("ready", False)
        if not isinstance(ready, bool):
            raise RequestError(f"'ready' must be true or false, got {ready!r:.40}", param="ready")
        response = await self._call(context, "RepositoryIndex", pb.RepositoryIndexRequest(ready=ready))
        return JSONResponse(
            [{name: value for name, value in to_json(entry).items() if value} for entry in response.models]
        )

    async def load(self, request: Request, context: RequestContext) -> ASGIApp:
        """Answers when the model is ready."""
        wanted = load_request(request.path_params["name"], await self._json(request, context))
        return await self._long(request, context, "RepositoryModelLoad", wanted)

    async def unload(self, request: Request, context: RequestContext) -> ASGIApp:
        """Answers when the model has stopped."""
        wanted = unload_request(request.path_params["name"], await self._json(request, context))
        return await self._long(request, context, "RepositoryModelUnload", wanted)

    async def trace(self, request: Request, context: RequestContext) -> ASGIApp:
        """Trace settings of a model or of all; a POST changes them."""
        body = await self._json(request, context) if request.method == "POST" else {}
        wanted = trace_request(request.path_params.get("name", ""), body)
        return JSONResponse(trace_json(await self._call(context, "TraceSetting", wanted)))

    async def log(self, request: Request, context: RequestContext) -> ASGIApp:
        """Log settings; a POST changes them."""
        body = await self._json(request, context) if request.method == "POST" else {}
        return JSONResponse(log_json(await self._call(context, "LogSettings", log_request(body))))

    async def system_status(self, request: Request, context: RequestContext) -> ASGIApp:
        """Registered regions of system shared memory."""
        wanted = pb.SystemSharedMemoryStatusRequest(name=request.path_params.get("region", ""))
        return await self._regions(context, "SystemSharedMemoryStatus", wanted)

    async def cuda_status(self, request: Request, context: RequestContext) -> ASGIApp:
        """Registered regions of CUDA shared memory."""
        wanted = pb.CudaSharedMemoryStatusRequest(name=request.path_params.get("region", ""))
        return await self._regions(context, "CudaSharedMemoryStatus", wanted)

    async def system_register(self, request: Request, context: RequestContext) -> ASGIApp:
        """Register a region of system shared memory."""
        body = await self._json(request, context)
        wanted = _made(
            lambda: pb.SystemSharedMemoryRegisterRequest(
                name=request.path_params["region"],
                key=body["key"],
                offset=body.get("offset", 0),
                byte_size=body["byte_size"],
            ),
            "'key', a string, and 'byte_size' and 'offset', numbers of bytes",
        )
        await self._call(context, "SystemSharedMemoryRegister", wanted)
        return JSONResponse({})

    async def cuda_register(self, request: Request, context: RequestContext) -> ASGIApp:
        """Register a region of CUDA shared memory."""
        body = await self._json(request, context)
        wanted = _made(
            lambda: pb.CudaSharedMemoryRegisterRequest(
                name=request.path_params["region"],
                raw_handle=base64.b64decode(body["raw_handle"]["b64"]),
                device_id=body["device_id"],
                byte_size=body["byte_size"],
            ),
            "'raw_handle', an object with the handle in base64 as 'b64', and 'device_id' and 'byte_size', numbers",
        )
        await self._call(context, "CudaSharedMemoryRegister", wanted)
        return JSONResponse({})

    async def system_unregister(self, request: Request, context: RequestContext) -> ASGIApp:
        """Forget a region of system shared memory, or all."""
        wanted = pb.SystemSharedMemoryUnregisterRequest(name=request.path_params.get("region", ""))
        await self._call(context, "SystemSharedMemoryUnregister", wanted)
        return JSONResponse({})

    async def cuda_unregister(self, request: Request, context: RequestContext) -> ASGIApp:
        """Forget a region of CUDA shared memory, or all."""
        wanted = pb.CudaSharedMemoryUnregisterRequest(name=request.path_params.get("region", ""))
        await self._call(context, "CudaSharedMemoryUnregister", wanted)
        return JSONResponse({})

    async def _regions(self, context: RequestContext, method: str, wanted: Message) -> ASGIApp:
        response = await self._call(context, method, wanted)
        return JSONResponse([to_json(region) for region in response.regions.values()])

    async def _long(self, request: Request, context: RequestContext, method: str, wanted: Message) -> ASGIApp:
        """A call that may take as long as an inference; a client that leaves cancels it."""
        call = self._call(context, method, wanted, timeout_s=self._resources.limits.timeout_s)
        await run_until_disconnect(request.receive, self._resources.stopping, call)
        return JSONResponse({})

    async def _json(self, request: Request, context: RequestContext) -> dict[str, Any]:
        """The body, an object; none is an empty one."""
        data = b"".join(await self._resources.body(request, context, self._resources.limits.max_json_bytes))
        return await self._resources.run(context, is_large(data), parse_json, data) if data.strip() else {}

    async def _call(
        self, context: RequestContext, method: str, wanted: Message, *, timeout_s: float = CALL_TIMEOUT_S
    ) -> Any:
        metadata = (*context.identity(), *context.trace_metadata())
        return await self._resources.router.call(method, wanted, timeout_s=timeout_s, metadata=metadata)


def _model(request: Request) -> tuple[str, str]:
    return request.path_params.get("name", ""), request.path_params.get("version", "")


def _made(make: Callable[[], Message], wanted: str) -> Message:
    try:
        return make()
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise RequestError(f"the body must have {wanted}: {type(error).__name__} {error}") from None
