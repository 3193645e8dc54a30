"""Graphs with maps over models of whole numbers, which count what comes to them."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
from tests.unit.router import make
from tests.unit.router.fake_target import FakeTarget

from weft.base.core import CallContext, InferCall, InferResult
from weft.base.errors import RemoteError
from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor, decode, encode
from weft.language import GraphLookup, GraphPlan, GraphSource
from weft.router.compile import compile_graph

#: A list of numbers, and one number for the request.
HEAD = """
name: "g" platform: "graph"
input  [ { name: "LIST" data_type: TYPE_INT64 dims: [ -1, 2 ] }, { name: "ADD" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
BATCHED = HEAD.replace('"graph"', '"graph" max_batch_size: 4')
#: The map of the tests, whose step is to be filled in.
READ = 'node { name: "root" map { over: "LIST" step { name: "s" %s } %s } }'


class Models:
    """Models by what their names begin with, and the largest batch after "@"; 0 is no batch dimension.

    ``sum``: S = the sum of LIST + ADD. ``repeat``: R = as many LIST[0] as LIST[1] says, in a variable dimension.
    ``fail``: S, unless a row has a 13. ``text``: T = a string of LIST.
    """

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As `Catalog.find`."""
        kind, _, batch = model_name.partition("@")
        inputs = (TensorSpec("LIST", "INT64", (2,)), TensorSpec("ADD", "INT64", (1,), is_optional=True))
        outputs = {"repeat": TensorSpec("R", "INT64", (-1,)), "text": TensorSpec("T", "BYTES", (1,))}
        output = outputs.get(kind, TensorSpec("S", "INT64", (1,)))
        return "model", ModelSignature(model_name, version or "1", "", int(batch or 0), inputs, (output,))

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return []


async def answer(call: InferCall, context: CallContext) -> InferResult:
    """What a model of ``Models`` answers."""
    kind, _, batch = call.model_name.partition("@")
    rows = decode(call.inputs["LIST"])
    add = decode(call.inputs["ADD"]) if "ADD" in call.inputs else np.zeros((*rows.shape[:-1], 1), np.int64)
    assert rows.shape[:-1] == add.shape[:-1]
    assert rows.ndim == 1 + (int(batch) > 0)
    if int(batch):
        assert 0 < len(rows) <= int(batch)
    await asyncio.sleep(0)
    if kind == "fail" and (rows == 13).any():
        raise RemoteError("UNAVAILABLE", "thirteen")
    if kind == "repeat":
        flat = rows.reshape(-1, 2)
        counts = {int(count) for count in flat[:, 1]}
        assert len(counts) == 1, "rows of one batch have one size"
        result = np.repeat(flat[:, :1], counts.pop(), axis=1).reshape(*rows.shape[:-1], -1)
    elif kind == "text":
        result = np.asarray([str(row.tolist()) for row in rows.reshape(-1, 2)], np.object_).reshape(*rows.shape[:-1], 1)
    else:
        result = rows.sum(axis=-1, keepdims=True) + add
    outputs = {output.name: encode(result) for output in call.outputs}
    return InferResult(call.model_name, "1", call.request_id, {}, outputs)


class Target(FakeTarget):
    """Answers every model of ``Models``."""

    async def infer(self, call: InferCall, context: CallContext) -> InferResult:
        """As ``Target.infer``; `peak` is the largest number of calls at once, `sizes` the rows of each."""
        self.answers.setdefault(call.model_name, answer)
        self.peak = max(getattr(self, "peak", 0), self.num_open + 1)
        return await super().infer(call, context)

    def sizes(self) -> list[tuple[int, ...]]:
        """Shapes of the rows of each call."""
        return [call.inputs["LIST"].shape for call in self.calls]


def compiled(nodes: str, head: str = HEAD, graphs: GraphLookup | None = None) -> GraphPlan:
    """A graph of these nodes."""
    return compile_graph(GraphSource(head + nodes, "graph.pbtxt"), Models(), graphs)


def numbers(*values: Any) -> WireTensor:
    """An INT64 tensor."""
    return encode(np.asarray(values, np.int64))


def lists(size: int, add: int = 0) -> Mapping[str, WireTensor]:
    """The inputs: rows [0, 0], [1, 10], ... and a number."""
    rows = np.arange(size)[:, None] * np.asarray([1, 10])
    return {"LIST": encode(rows.astype(np.int64).reshape(size, 2)), "ADD": numbers(add)}


async def outputs(
    plan: GraphPlan, target: FakeTarget, inputs: Mapping[str, WireTensor], **options: Any
) -> dict[str, Any]:
    """What the graph gives, as nested lists."""
    result = await make.run(plan, target, inputs, **options)
    return {name: decode(tensor).tolist() for name, tensor in result.outputs.items()}
