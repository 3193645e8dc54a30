"""Graphs as text, over models that are known by their names alone."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from weft.base.signature import ModelSignature, TensorSpec
from weft.base.tensors import WireTensor
from weft.language import GraphPlan, GraphSource
from weft.router.compile import compile_graph

#: From X to Y, one number each; the same with a batch dimension.
HEAD = """
name: "g" platform: "graph"
input  [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
BATCHING = HEAD.replace('"graph"', '"graph" max_batch_size: 16')
DEFAULT = 'default { output: "Y" number: -1 dims: [ 1 ] }'


class Models:
    """Every name but `missing` is a model from X (and, with "+Z" in its name, Z) to Y (and, with "-W", W).

    With "+O" it has an optional input O, with "-V" an optional output V.

    One with "judge" in its name takes a stack S of two members and a MASK. All batch where the graph does.
    """

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size

    def find(self, model_name: str, version: str) -> tuple[str, ModelSignature] | None:
        """As `Catalog.find`."""
        if model_name == "missing":
            return None
        inputs = [TensorSpec(name, "FP32", (1,)) for name in ("X", *(["Z"] if "+Z" in model_name else []))]
        if "+O" in model_name:
            inputs.append(TensorSpec("O", "FP32", (1,), is_optional=True))
        if "judge" in model_name:
            inputs = [TensorSpec("S", "FP32", (-1, 1)), TensorSpec("MASK", "BOOL", (-1,))]
        outputs = [TensorSpec(name, "FP32", (1,)) for name in ("Y", *(["W"] if "-W" in model_name else []))]
        if "-V" in model_name:
            outputs.append(TensorSpec("V", "FP32", (1,), is_optional=True))
        return "model", ModelSignature(
            model_name, version or "1", "", self.max_batch_size, tuple(inputs), tuple(outputs)
        )

    def names(self) -> list[str]:
        """As `Catalog.names`."""
        return ["present"]


class Others:
    """The graphs beside one, by name, all of version 1."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts

    def find(self, name: str, version: str) -> GraphSource | None:
        """As `GraphLookup.find`."""
        return GraphSource(self.texts[name], f"{name}.pbtxt", name, "1") if name in self.texts else None

    def names(self) -> list[str]:
        """As `GraphLookup.names`."""
        return list(self.texts)


def compiled(nodes: str, head: str = HEAD, **others: str) -> GraphPlan:
    """The plan of a head and nodes; `others` are the texts of graphs that its steps may name."""
    models = Models(16 if "max_batch_size" in head else 0)
    return compile_graph(GraphSource(head + nodes, "graph.pbtxt"), models, Others(others))


def sequence(*steps: str, name: str = "root") -> str:
    return f'node {{ name: "{name}" sequence {{ {" ".join(steps)} }} }}'


def x(*values: float) -> Mapping[str, WireTensor]:
    """The input X: one number, or a row for each."""
    given = values or (1.0,)
    shape = (len(given), 1) if len(given) > 1 else (1,)
    return {"X": WireTensor("FP32", shape, np.asarray(given, np.float32).tobytes())}


def y(result: Any) -> float:
    """Value of the output Y."""
    return float(np.frombuffer(result.outputs["Y"].data, np.float32)[0])
