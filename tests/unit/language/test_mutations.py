"""Graphs that are nearly right: fields of other graphs in the places of their own."""

import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tests.unit.router.fake_target import FakeTarget

from weft.base.text.pbtxt import is_map
from weft.language import GraphError, GraphSource
from weft.router.compile import check_graph, compile_graph
from weft.router.executor import GraphExecutor
from weft.router.runtime import Runtime
from weft_protos.graph_pb2 import Graph

NUM_GRAPHS = 400
FOLDER = Path(__file__).parent
TEXTS = [file.read_text() for folder in ("good", "bad") for file in sorted((FOLDER / folder).glob("*.pbtxt"))]
NAMES = ["", "TEXT", "PROBS", "root", "xlmr", "stream", "inner", "a b", "é", "A" * 99, "x.PROBS", "\0", "a\nb"]
NUMBERS = [0, 1, -1, 2**31 - 1]


def _parsed() -> Iterator[Graph]:
    for text in TEXTS:
        try:
            yield text_format.Parse(text, Graph())
        except text_format.ParseError:
            continue


def _inside(message: Message) -> Iterator[Message]:
    """The message and all in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type and not is_map(field):
            for inner in value if field.is_repeated else [value]:
                yield from _inside(inner)


Found = dict[str, list[object]]


def _values_of(graphs: list[Graph]) -> Found:
    """Full name of a field -> what graphs have there."""
    found: Found = defaultdict(list)
    for graph in graphs:
        for message in _inside(graph):
            for field, value in message.ListFields():
                found[field.full_name] += value.items() if is_map(field) else value if field.is_repeated else [value]
    return found


def _mutate(message: Message, field: FieldDescriptor, found: Found, rng: random.Random) -> None:
    """Empty a field, shorten or shuffle it, or give it something that another graph has there."""
    values, what = found[field.full_name], rng.random()
    if what < 0.2 or not values:
        message.ClearField(field.name)
    elif is_map(field):
        key, value = rng.choice(values)
        if isinstance(value, str):
            getattr(message, field.name)[rng.choice([key, *NAMES])] = rng.choice([value, *NAMES])
    elif field.is_repeated:
        items = list(getattr(message, field.name))
        rng.shuffle(items)
        kept = [*items[: rng.randint(0, len(items))], rng.choice(values)]
        copy = type(message)()
        getattr(copy, field.name).extend(kept)
        message.ClearField(field.name)
        message.MergeFrom(copy)
    elif field.message_type:
        getattr(message, field.name).CopyFrom(rng.choice(values))
    elif field.type == FieldDescriptor.TYPE_STRING:
        setattr(message, field.name, rng.choice([*values, *NAMES]))
    elif field.type in (FieldDescriptor.TYPE_BOOL, FieldDescriptor.TYPE_ENUM):
        setattr(message, field.name, rng.choice(values))
    else:
        low = 0 if field.type in (FieldDescriptor.TYPE_UINT32, FieldDescriptor.TYPE_UINT64) else -1
        setattr(message, field.name, rng.choice([*values, *(number for number in NUMBERS if number >= low)]))


def _mutated(graphs: list[Graph], found: Found, rng: random.Random) -> str:
    graph = Graph()
    graph.CopyFrom(rng.choice(graphs))
    for _ in range(rng.randint(1, 5)):
        message = rng.choice(list(_inside(graph)))
        given = [field for field, _ in message.ListFields()]
        fields = given if given and rng.random() < 0.5 else message.DESCRIPTOR.fields
        _mutate(message, rng.choice(fields), found, rng)  # type: ignore[arg-type]
    return text_format.MessageToString(graph, as_utf8=True)


def test_a_mutated_graph_is_refused_with_places_or_can_be_assembled(catalog, graphs):
    """Nothing but findings comes of it, each inside the file; what has no error compiles, and can be run."""
    num_good, parsed = 0, list(_parsed())
    values = _values_of(parsed)
    for seed in range(NUM_GRAPHS):
        text = _mutated(parsed, values, random.Random(seed))
        lines = text.split("\n")
        source = GraphSource(text, "mutated.pbtxt")
        found = check_graph(source, catalog, graphs)
        own = [(one.line, one.column) for one in found if one.file == source.file and one.line]
        assert sorted(own) == own
        assert all(line <= len(lines) and column <= len(lines[line - 1]) + 1 for line, column in own), seed
        if any(one.severity == "error" for one in found):
            with pytest.raises(GraphError) as caught:
                compile_graph(source, catalog, graphs)
            assert found == caught.value.diagnostics
        else:
            num_good += 1
            GraphExecutor(compile_graph(source, catalog, graphs), Runtime({"model": FakeTarget()}))
    assert num_good > NUM_GRAPHS // 100
