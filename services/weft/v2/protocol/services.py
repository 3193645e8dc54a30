"""Builds servicers and stubs from service descriptors, without the grpcio that protoc's generated code needs."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as _Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from weft.wire.interface import grpc


def method_handlers(servicer: object, service: ServiceDescriptor) -> dict[str, Any]:
    """Return a handler for each method of the service that the servicer implements, by name."""
    return {
        method.name: _of_kind(grpc, method, "_rpc_method_handler")(
            getattr(servicer, method.name),
            request_deserializer=_request_class(method).FromString,
            response_serializer=_response_class(method).SerializeToString,
        )
        for method in service.methods
        if hasattr(servicer, method.name)
    }


def add_service(server: grpc.aio.Server, service: str, handlers: Mapping[str, Any]) -> None:
    """Register the handlers of a service, by its full name and the names of its methods."""
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, dict(handlers)),))
    server.add_registered_method_handlers(service, dict(handlers))  # type: ignore[attr-defined]  # not in the stubs


def stub_of(channel: Any, service: ServiceDescriptor) -> Any:
    """Return a stub: an object with each method of the service, like the one protoc generates."""
    return SimpleNamespace(
        **{
            method.name: _of_kind(channel, method, "")(
                f"/{service.full_name}/{method.name}",
                request_serializer=_request_class(method).SerializeToString,
                response_deserializer=_response_class(method).FromString,
            )
            for method in service.methods
        }
    )


def _of_kind(owner: Any, method: MethodDescriptor, suffix: str) -> Callable[..., Any]:
    request, response = (
        "stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming)
    )
    made: Callable[..., Any] = getattr(owner, f"{request}_{response}{suffix}")
    return made


def _request_class(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.input_type)


def _response_class(method: MethodDescriptor) -> Any:
    return GetMessageClass(method.output_type)


_PACKAGE = "grpc.health.v1"
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def _described() -> FileDescriptorProto:
    """``grpc.health.v1``, for a descriptor pool of its own: other packages may bring the same file.

    Source:
        https://github.com/grpc/grpc/blob/master/src/proto/grpc/health/v1/health.proto
    """
    file = FileDescriptorProto(name="grpc/health/v1/health.proto", package=_PACKAGE, syntax="proto3")
    field = _Field(name="service", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    file.message_type.add(name="HealthCheckRequest").field.append(field)
    response = file.message_type.add(name="HealthCheckResponse")
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(_STATUSES):
        statuses.value.add(name=name, number=number)
    name = f".{_PACKAGE}.HealthCheckResponse.ServingStatus"
    response.field.add(name="status", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_ENUM, type_name=name)
    file.message_type.add(name="HealthListRequest")
    listed = file.message_type.add(name="HealthListResponse")
    entry = listed.nested_type.add(name="StatusesEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    named = f".{_PACKAGE}.HealthCheckResponse"
    entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_MESSAGE, type_name=named)
    entries = f".{_PACKAGE}.HealthListResponse.StatusesEntry"
    listed.field.add(
        name="statuses", number=1, label=_Field.LABEL_REPEATED, type=_Field.TYPE_MESSAGE, type_name=entries
    )
    service = file.service.add(name="Health")
    service.method.add(
        name="List", input_type=f".{_PACKAGE}.HealthListRequest", output_type=f".{_PACKAGE}.HealthListResponse"
    )
    types = {"input_type": f".{_PACKAGE}.HealthCheckRequest", "output_type": f".{_PACKAGE}.HealthCheckResponse"}
    service.method.add(name="Check", **types)
    service.method.add(name="Watch", **types, server_streaming=True)
    return file


_pool = DescriptorPool()
_pool.AddSerializedFile(_described().SerializeToString())

HEALTH: ServiceDescriptor = _pool.FindServiceByName(f"{_PACKAGE}.Health")
HealthCheckRequest: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckRequest"))
HealthCheckResponse: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckResponse"))
HealthListRequest: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthListRequest"))
HealthListResponse: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthListResponse"))
