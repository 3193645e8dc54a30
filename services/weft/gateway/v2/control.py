"""Messages of everything but inference as JSON, and the other way round."""

import base64
import binascii
from typing import Any

from google.protobuf.message import Message

from weft.gateway.errors import RequestError
from weft.gateway.json_text import json_type, whole
from weft.v2.protocol.encoding import fill_parameters
from weft_protos import grpc_service_pb2 as pb

_FILE_PREFIX = "file:"
#: What this interface adds to the extensions of the server behind it.
_EXTENSIONS = ("binary_tensor_data", "generate")


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


def server_json(response: pb.ServerMetadataResponse) -> dict[str, Any]:
    """Name, version and extensions."""
    fields = to_json(response)
    return fields | {"extensions": [*fields["extensions"], *_EXTENSIONS]}


def index_request(body: dict[str, Any]) -> pb.RepositoryIndexRequest:
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


def log_json(response: pb.LogSettingsResponse) -> dict[str, Any]:
    """Log settings."""
    return {
        key: getattr(setting, setting.WhichOneof("parameter_choice") or "string_param")
        for key, setting in response.settings.items()
    }
