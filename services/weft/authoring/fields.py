"""Fields of messages from keywords: names, enums and nesting come from the proto descriptors alone."""

import keyword
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from weft.authoring.faults import Place, fault
from weft.base.signature import TensorSpec
from weft.base.tensors import FLOATS, INTEGERS
from weft.base.text.pbtxt import is_map, suggestion
from weft_protos import graph_pb2 as pb

POLICY_FIELDS = frozenset(field.name for field in pb.Policy.DESCRIPTOR.fields)


class Writer(Protocol):
    """Writes what depends on the node in which a field stands."""

    def text(self, value: Any, field: FieldDescriptor) -> Any:
        """Value of a text field: the text of a condition, or the name of a tensor, a step or an enum."""

    def step(self, message: pb.Step, value: Any, path: str) -> None:
        """Fill the message of a step inside a step."""


def plain_name(name: str) -> str:
    """The field that a keyword names: ``while_`` is ``while``, which is a word of Python."""
    bare = name.removesuffix("_")
    return bare if keyword.iskeyword(bare) else name


def known_fields(*descriptors: Descriptor | None, but: Collection[str] = ()) -> set[str]:
    """Names of all fields of these messages."""
    return {field.name for one in descriptors if one is not None for field in one.fields} - set(but)


def check_known(what: str, fields: Iterable[str], known: Iterable[str], place: Place | None = None) -> None:
    """Raise GraphError (G001) if one of the fields does not exist."""
    for name in fields:
        if name not in known:
            raise fault("G001", f"{what} has no field '{name}'{suggestion(name, sorted(known))}", place)


def fill(message: Message, fields: Mapping[str, Any], path: str, writer: Writer) -> None:
    """Set fields of a message.

    A message inside may be given as a dict, as a message, or, where it has one field, as the value of that; one element
    may stand for a list of one, and an enum is text.

    Raises:
        GraphError: An unknown field, a value of another type or out of range (G001).
    """
    descriptor: Any = message.DESCRIPTOR
    named = {plain_name(name): value for name, value in fields.items()}
    check_known(f"'{descriptor.name}'", named, descriptor.fields_by_name)
    for name, value in named.items():
        field = descriptor.fields_by_name[name]
        try:
            _set(message, field, value, f"{path}.{name}".removeprefix("."), writer)
        except (TypeError, ValueError) as error:
            raise fault(
                "G001", f"{name}={value!r} is no value of field '{name}' of '{descriptor.name}': {error}"
            ) from None


def fill_with_policy(message: Any, fields: Mapping[str, Any], path: str, writer: Writer) -> None:
    """As ``fill``, for a message with a ``policy``, whose fields may stand beside the message's own."""
    fill(message, {name: value for name, value in fields.items() if name not in POLICY_FIELDS}, path, writer)
    if policy := {name: value for name, value in fields.items() if name in POLICY_FIELDS}:
        fill(message.policy, policy, f"{path}.policy".removeprefix("."), writer)


def _set(message: Any, field: FieldDescriptor, value: Any, path: str, writer: Writer) -> None:
    held = getattr(message, field.name)
    entry = field.message_type
    if entry is not None and is_map(field):
        for key, one in dict(value).items():
            if hasattr(held, "get_or_create"):
                _fill_one(held[key], one, f"{path}[{key}]", writer)
            else:
                held[key] = _scalar(entry.fields_by_name["value"], one, writer)
    elif field.is_repeated:
        for one in value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]:
            if field.message_type is not None:
                _fill_one(held.add(), one, f"{path}[{len(held) - 1}]", writer)
            else:
                held.append(_scalar(field, one, writer))
    elif field.message_type is not None:
        held.SetInParent()
        _fill_one(held, value, path, writer)
    else:
        setattr(message, field.name, _scalar(field, value, writer))


def _fill_one(message: Any, value: Any, path: str, writer: Writer) -> None:
    descriptor = message.DESCRIPTOR
    if isinstance(value, Message):
        message.MergeFrom(value)
    elif isinstance(value, Mapping):
        fill(message, value, path, writer)
    elif descriptor is pb.Step.DESCRIPTOR:
        writer.step(message, value, path)
    elif len(descriptor.fields) == 1:
        fill(message, {descriptor.fields[0].name: value}, path, writer)
    else:
        raise TypeError(f"give a dict of {', '.join(field.name for field in descriptor.fields)}")


def _scalar(field: FieldDescriptor, value: Any, writer: Writer) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        names = field.enum_type.values_by_name
        known = value if value in names else f"TYPE_{value}"
        if known not in names:
            raise ValueError(f"there is no '{value}'{suggestion(value, names)}")
        return names[known].number
    if field.type != field.TYPE_STRING:
        return value
    text = writer.text(value, field)
    if not isinstance(text, str):
        raise TypeError("give text")
    return text


#: V2 datatypes -> the list of ``Constant`` and ``Default`` that has their elements.
_LISTS = {**dict.fromkeys(FLOATS, "number"), **dict.fromkeys(INTEGERS, "integer"), "BOOL": "boolean", "BYTES": "text"}
_LISTS_OF_KINDS = {"f": "number", "i": "integer", "u": "integer", "b": "boolean", "U": "text", "S": "text", "O": "text"}


def elements_of(value: Any, spec: TensorSpec | None) -> dict[str, Any]:
    """A Python value, list or array as the fields of a ``Constant`` or ``Default``, without its name.

    Args:
        spec: Of the tensor that has the value; None if it is not known.

    Raises:
        GraphError: The value is of another type than the tensor (G007), or ragged (G008).
    """
    try:
        array = np.asarray(value)
    except ValueError:
        raise fault("G008", f"{value!r} is no tensor: its lists have different lengths") from None
    kind = _LISTS_OF_KINDS.get(array.dtype.kind, "")
    name = _LISTS.get(spec.datatype, "") if spec is not None else kind
    if name != kind and (name, kind) != ("number", "integer") and array.size:
        title = f"'{spec.name}' is {spec.datatype}" if spec is not None else "it is no number and no text"
        raise fault("G007", f"{value!r} does not fit: {title}; a constant is a number, text, bool, or a list of them")
    fields: dict[str, Any] = {name: array.reshape(-1).tolist()}
    is_clear = array.size == 1 if spec is None or -1 in spec.dims else array.ndim == 0 or array.shape == spec.dims
    return fields if is_clear else {**fields, "dims": array.shape}
