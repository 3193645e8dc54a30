"""Whatever graph.proto can say has a spelling, on the day that the proto has it."""

from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor

import weft
from weft.authoring.faults import here
from weft.authoring.graph import trace_graph
from weft.authoring.nodes import KINDS
from weft.base.text.pbtxt import is_map
from weft_protos import graph_pb2 as pb

FLOAT = weft.Tensor[weft.FP32, 1]
#: What a function's parameters and annotation, its steps and the target of a call say.
BY_THE_FUNCTION = {"Graph": {"input", "output", "node", "name"}, "Step": {"model_name", "node", "graph"}}


def _fields(descriptor: Descriptor) -> list[Any]:
    left = BY_THE_FUNCTION.get(descriptor.name, set())
    return [pytest.param(one, id=one.full_name) for one in descriptor.fields if one.name not in left]


def _value(field: FieldDescriptor, depth: int = 0) -> Any:
    """A value of a field: dicts for messages, two of what is repeated."""
    if is_map(field):
        values = field.message_type.fields_by_name["value"]
        return {"k": _value(values, depth)}
    if field.message_type is not None and field.message_type is not pb.Step.DESCRIPTOR:
        inner = field.message_type.fields if depth < 3 else ()
        chosen = {one.containing_oneof.name if one.containing_oneof else one.name: one for one in inner}
        one: Any = {name.name: _value(name, depth + 1) for name in chosen.values()}
    elif field.message_type is not None:
        one = pb.Step(model_name="x")
    elif field.enum_type is not None:
        one = field.enum_type.values[-1].name
    else:
        one = {field.TYPE_STRING: "text", field.TYPE_BOOL: True}.get(field.type, 3)
    return [one, one] if field.is_repeated else one


def _message(field: Any) -> Any:
    """A message that has this field, as protobuf itself makes it."""
    return field.containing_type._concrete_class(**{field.name: _value(field)})


def _traced(body: Any, **fields: Any) -> pb.Graph:
    body.__annotations__ = {"X": FLOAT, "return": weft.Outputs(Y=FLOAT)}
    return trace_graph(body, fields, here()).message


def _keyword(field: FieldDescriptor) -> str:
    return f"{field.name}_" if field.name in ("while", "import", "from", "as") else field.name


@pytest.mark.parametrize("field", [*_fields(pb.Step.DESCRIPTOR), *_fields(pb.Policy.DESCRIPTOR)])
def test_a_step(field: FieldDescriptor) -> None:
    """Each field of a step, and of its policy, is a keyword of the call."""

    def body(X: Any) -> Any:
        call = weft.step(model_name="m", X=X, **{_keyword(field): _value(field)})
        return {"Y": weft.step(model_name="last", X=X, Z=X).Y} if field.name == "shadow" else {"Y": call.Y}

    step = _traced(body).node[0].sequence.step[0]
    owner = step.policy if field.containing_type is pb.Policy.DESCRIPTOR else step
    assert getattr(_message(field), field.name) == _without(
        getattr(owner, field.name), "Y" if field.name == "output_map" else ""
    )


def _without(value: Any, key: str) -> Any:
    return {name: one for name, one in value.items() if name != key} if key else value


@pytest.mark.parametrize(
    "field", [one for kind in KINDS.values() for one in _fields(kind) if one.values[0].name != "step"]
)
def test_a_kind(field: FieldDescriptor) -> None:
    """Each field of each kind of node is a keyword of what makes such a node."""
    (kind,) = (name for name, message in KINDS.items() if message is field.containing_type)

    def body(X: Any) -> Any:
        return {"Y": weft.construct(kind, weft.step(model_name="m", X=X), **{_keyword(field): _value(field)}).Y}

    node = _traced(body).node[1]
    assert getattr(_message(field), field.name) == getattr(getattr(node, kind), field.name)


@pytest.mark.parametrize("field", [one for one in _fields(pb.Node.DESCRIPTOR) if one.values[0].name not in KINDS])
def test_a_node(field: FieldDescriptor) -> None:
    """Each field of a node is a keyword of `@weft.node`."""

    def inner(X: Any) -> Any:
        return {"Y": weft.step(model_name="m", X=X).Y}

    def body(X: Any) -> Any:
        return {"Y": weft.node(**{field.name: _value(field)})(inner)(X).Y}

    assert getattr(_message(field), field.name) == getattr(_traced(body).node[1], field.name)


@pytest.mark.parametrize("field", [*_fields(pb.Graph.DESCRIPTOR), *_fields(pb.Policy.DESCRIPTOR)])
def test_a_graph(field: FieldDescriptor) -> None:
    """Each field of a graph, and of its policy, is a keyword of `@weft.graph`."""

    def body(X: Any) -> Any:
        return {"Y": weft.step(model_name="m", X=X).Y}

    message = _traced(body, **{_keyword(field): _value(field)})
    owner = message.policy if field.containing_type is pb.Policy.DESCRIPTOR else message
    assert getattr(_message(field), field.name) == getattr(owner, field.name)
