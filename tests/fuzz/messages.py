"""Hypothesis strategies for protobuf messages: any message of a descriptor, and requests that are nearly right."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from weft.base.tensors import encode_bytes
from weft_protos import grpc_service_pb2 as pb

#: Names that exist somewhere in the samples, among others that are traps for files, logs and shells.
NAMES = (
    "identity",
    "simple",
    "digits",
    "digits_mlp",
    "decode_digit",
    "embed",
    "mean_pool",
    "INPUT0",
    "IMAGE",
    "OUTPUT0",
)
TRAPS = (
    "", ".", "..", "../../etc/passwd", "a/b", "a\\b", "\0", "\n\r", "%s%n", "\u202etxt", "名", "x" * 5000, "-1",
    "*", " ",
)  # fmt: skip
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1)
_SIZES: Mapping[str, int] = {
    "BOOL": 1, "UINT8": 1, "INT8": 1, "UINT16": 2, "INT16": 2, "FP16": 2, "BF16": 2, "UINT32": 4, "INT32": 4, "FP32": 4,
    "UINT64": 8, "INT64": 8, "FP64": 8,
}  # fmt: skip
_PICTURE = (Path(__file__).parents[2] / "model_repository/data/digits/7.png").read_bytes()

names = st.sampled_from(NAMES) | st.sampled_from(TRAPS) | st.text(max_size=20)


def integers(low: int, high: int) -> SearchStrategy[int]:
    """Integers of a range, its ends and the ends of other ranges more often than by chance."""
    return st.sampled_from([value for value in _INTEGERS if low <= value <= high]) | st.integers(low, high)


_SCALARS: Mapping[int, SearchStrategy[Any]] = {
    FieldDescriptor.CPPTYPE_INT32: integers(-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: integers(-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: integers(0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: integers(0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: st.floats(),
    FieldDescriptor.CPPTYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


@functools.cache
def any_message(descriptor: Descriptor, depth: int = 3) -> SearchStrategy[Message]:
    """Messages with any of their fields set to anything, nested at most ``depth`` deep."""
    fields = [field for field in descriptor.fields if depth > 0 or field.message_type is None]
    return st.fixed_dictionaries({}, optional={field.name: _values(field, depth) for field in fields}).map(
        lambda values: GetMessageClass(descriptor)(**_one_of_each(descriptor, values))
    )


def _values(field: FieldDescriptor, depth: int) -> SearchStrategy[Any]:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        entry = field.message_type.fields_by_name
        return st.dictionaries(_value(entry["key"], depth - 1), _value(entry["value"], depth - 1), max_size=3)
    value = _value(field, depth - 1)
    return st.lists(value, max_size=3) if field.is_repeated else value


def _value(field: FieldDescriptor, depth: int) -> SearchStrategy[Any]:
    if field.message_type is not None:
        return any_message(field.message_type, depth)
    if field.enum_type is not None:
        return st.sampled_from([value.number for value in field.enum_type.values])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.binary(max_size=40) if field.type == FieldDescriptor.TYPE_BYTES else names
    return _SCALARS[field.cpp_type]


def _one_of_each(descriptor: Descriptor, values: dict[str, Any]) -> dict[str, Any]:
    """Without the fields of a oneof that come after the first one set."""
    for group in descriptor.oneofs:
        for name in [field.name for field in group.fields if field.name in values][1:]:
            del values[name]
    return values


@st.composite
def infer_requests(draw: st.DrawFn, models: Mapping[str, pb.ModelMetadataResponse]) -> pb.ModelInferRequest:
    """A request for one of the models as its metadata ask for it, and then up to three things wrong with it."""
    name = draw(st.sampled_from(sorted(models)))
    request = pb.ModelInferRequest(model_name=name, id=draw(st.text(max_size=5)))
    rows = draw(st.integers(1, 3))
    for tensor in models[name].inputs:
        shape = [rows if i == 0 else draw(st.integers(1, 4)) if dim < 0 else dim for i, dim in enumerate(tensor.shape)]
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=shape)
        request.raw_input_contents.append(_content(draw, tensor.datatype, shape))
    for damage in draw(st.lists(st.sampled_from(_DAMAGES), max_size=3)):
        damage(draw, request)
    return request


def _content(draw: st.DrawFn, datatype: str, shape: list[int]) -> bytes:
    count = 1
    for dim in shape:
        count *= dim
    if datatype == "BYTES":
        return encode_bytes([draw(st.binary(max_size=30) | pictures()) for _ in range(count)])
    return draw(st.binary(min_size=1, max_size=8)) * count * _SIZES[datatype]


@st.composite
def pictures(draw: st.DrawFn) -> bytes:
    """A PNG file with some of its bytes changed, or a part of it missing."""
    data = bytearray(_PICTURE)
    for _ in range(draw(st.integers(0, 4))):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data)


_parameters = any_message(pb.InferParameter.DESCRIPTOR)
_KEYS = (
    "priority", "timeout", "sequence_id", "sequence_start", "sequence_end", "classification", "binary_data",
    "shared_memory_region", "shared_memory_byte_size", "shared_memory_offset", "graph_trace",
    "triton_enable_empty_final_response", "x", "",
)  # fmt: skip


def _with_tensor(change: Callable[[st.DrawFn, Any], None]) -> Callable[[st.DrawFn, pb.ModelInferRequest], None]:
    def damage(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
        if request.inputs:
            change(draw, request.inputs[draw(st.integers(0, len(request.inputs) - 1))])

    return damage


def _rename(draw: st.DrawFn, tensor: Any) -> None:
    tensor.name = draw(names)


def _retype(draw: st.DrawFn, tensor: Any) -> None:
    tensor.datatype = draw(st.sampled_from([*_SIZES, "BYTES", "", "FP128", "fp32"]) | st.text(max_size=5))


def _reshape(draw: st.DrawFn, tensor: Any) -> None:
    tensor.shape[:] = draw(st.lists(integers(-(2**63), 2**63 - 1), max_size=9) | st.just([1] * 5000))


def _set_parameter(draw: st.DrawFn, holder: Any) -> None:
    holder.parameters[draw(st.sampled_from(_KEYS))].CopyFrom(draw(_parameters))


def _set_contents(draw: st.DrawFn, tensor: Any) -> None:
    tensor.contents.CopyFrom(draw(any_message(pb.InferTensorContents.DESCRIPTOR)))


def _cut(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
    request.raw_input_contents[:] = [
        content[: draw(st.integers(0, len(content)))] + draw(st.binary(max_size=9))
        for content in request.raw_input_contents
    ]


def _drop(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
    del draw(st.sampled_from([request.inputs, request.raw_input_contents]))[:1]


def _double(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
    request.inputs.extend(list(request.inputs) * draw(st.integers(1, 3)))
    if draw(st.booleans()):
        request.raw_input_contents.extend(list(request.raw_input_contents))


def _ask(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
    output = request.outputs.add(name=draw(names))
    if draw(st.booleans()):
        _set_parameter(draw, output)


def _version(draw: st.DrawFn, request: pb.ModelInferRequest) -> None:
    request.model_version = draw(names | st.sampled_from(["1", "01", "999999999999999999999", "1.0"]))


_DAMAGES = (
    _with_tensor(_rename), _with_tensor(_retype), _with_tensor(_reshape), _with_tensor(_set_parameter),
    _with_tensor(_set_contents), _set_parameter, _cut, _drop, _double, _ask, _version,
)  # fmt: skip
