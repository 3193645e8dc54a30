"""Messages of ``grpc.health.v1``, in a descriptor pool of their own: other packages may bring the same file.

Source:
    https://github.com/grpc/grpc/blob/master/src/proto/grpc/health/v1/health.proto
"""

from typing import Any

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as _Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

_PACKAGE = "grpc.health.v1"
_STATUSES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")


def _described() -> FileDescriptorProto:
    file = FileDescriptorProto(name="grpc/health/v1/health.proto", package=_PACKAGE, syntax="proto3")
    field = _Field(name="service", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
    file.message_type.add(name="HealthCheckRequest").field.append(field)
    response = file.message_type.add(name="HealthCheckResponse")
    statuses = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(_STATUSES):
        statuses.value.add(name=name, number=number)
    name = f".{_PACKAGE}.HealthCheckResponse.ServingStatus"
    response.field.add(name="status", number=1, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_ENUM, type_name=name)
    service = file.service.add(name="Health")
    types = {"input_type": f".{_PACKAGE}.HealthCheckRequest", "output_type": f".{_PACKAGE}.HealthCheckResponse"}
    service.method.add(name="Check", **types)
    service.method.add(name="Watch", **types, server_streaming=True)
    return file


_pool = DescriptorPool()
_pool.AddSerializedFile(_described().SerializeToString())

HEALTH: ServiceDescriptor = _pool.FindServiceByName(f"{_PACKAGE}.Health")
HealthCheckRequest: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckRequest"))
HealthCheckResponse: Any = GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.HealthCheckResponse"))
