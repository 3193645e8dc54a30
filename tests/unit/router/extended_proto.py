"""A `graph.proto` with something new in it, without generating code, for the examples of docs/extending.md."""

from collections.abc import Callable
from types import ModuleType

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from weft_protos import graph_pb2

FileProto = descriptor_pb2.FileDescriptorProto
FieldProto = descriptor_pb2.FieldDescriptorProto


def messages(package: str, extend: Callable[[FileProto], None]) -> ModuleType:
    """A module with the messages of the language, extended, in a package of their own, in place of ``graph_pb2``."""
    file = FileProto()
    graph_pb2.DESCRIPTOR.CopyToProto(file)
    extend(file)
    before, file.name, file.package = f".{file.package}.", f"{package}.proto", f"{file.package}.{package}"
    for message in file.message_type:
        for inner in (message, *message.nested_type):
            for one in filter(lambda field: field.type_name, inner.field):
                one.type_name = one.type_name.replace(before, f".{file.package}.")
    pool = descriptor_pool.Default()
    try:
        found = pool.FindFileByName(file.name)
    except KeyError:
        pool.Add(file)
        found = pool.FindFileByName(file.name)
    made = ModuleType(package)
    for name, message_type in found.message_types_by_name.items():
        setattr(made, name, message_factory.GetMessageClass(message_type))
    return made


def message_of(file: FileProto, name: str) -> descriptor_pb2.DescriptorProto:
    """A message of the file."""
    return next(message for message in file.message_type if message.name == name)


def add_message(file: FileProto, name: str, *numbers: str) -> None:
    """A message with fields of type uint32."""
    message = file.message_type.add(name=name)
    for number, field in enumerate(numbers, start=1):
        message.field.add(name=field, number=number, label=FieldProto.LABEL_OPTIONAL, type=FieldProto.TYPE_UINT32)


def add_field(file: FileProto, owner: str, name: str, number: int, message: str) -> FieldProto:
    """A field of ``owner`` that holds ``message``."""
    field = message_of(file, owner).field.add(name=name, number=number, label=FieldProto.LABEL_OPTIONAL)
    field.type, field.type_name = FieldProto.TYPE_MESSAGE, f".{file.package}.{message}"
    return field


def add_value(file: FileProto, owner: str, enum: str, name: str) -> None:
    """A further value of an enum of ``owner``."""
    found = next(one for one in message_of(file, owner).enum_type if one.name == enum)
    found.value.add(name=name, number=len(found.value))
