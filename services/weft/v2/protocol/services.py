"""Servicers and stubs of gRPC services from their descriptors; what protoc generates for the same needs grpcio."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass

from weft.wire.interface import grpc


def method_handlers(servicer: object, service: ServiceDescriptor) -> dict[str, Any]:
    """A handler of each method of a service that the servicer has, by name."""
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
    """An object with each method of a service, as the stub that protoc generates."""
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
