"""ONNX models that repeat one operation, for measuring what it takes."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

_OPSET, _IR_VERSION = 20, 10
Floats = NDArray[np.float32]


class Chain:
    """A model whose nodes feed one another; every tensor is float32.

    Args:
        shape: Of the input ``x``.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._last = "x"

    def add(
        self, op_type: str, *weights: NDArray[Any], domain: str = "", twice: bool = False, **attributes: Any
    ) -> None:
        """Append a node that takes the result so far, then constants; ``twice``: the result so far again."""
        names = []
        for weight in weights:
            names.append(f"w{len(self._weights)}")
            self._weights.append(numpy_helper.from_array(weight, names[-1]))
        output = f"t{len(self._nodes)}"
        inputs = [self._last, *([self._last] if twice else []), *names]
        self._nodes.append(helper.make_node(op_type, inputs, [output], domain=domain, **attributes))
        self._last = output

    def serialized(self) -> bytes:
        """The model."""
        graph = helper.make_graph(
            self._nodes,
            "chain",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, self._shape)],
            [helper.make_tensor_value_info(self._last, TensorProto.FLOAT, None)],
            self._weights,
        )
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION)
        return bytes(model.SerializeToString())


def chain_of(shape: tuple[int, ...], num_nodes: int, add: Callable[[Chain, int], None]) -> bytes:
    """A model of so many nodes, each appended by ``add`` with its index."""
    chain = Chain(shape)
    for index in range(num_nodes):
        add(chain, index)
    return chain.serialized()


def several(shape: tuple[int | str, ...], num_tensors: int) -> bytes:
    """A model of inputs ``x``, ``y``, ``z``, ... and as many outputs."""
    names = [chr(ord("x") + index) for index in range(num_tensors)]
    graph = helper.make_graph(
        [helper.make_node("Neg", [name], [f"{name}_out"]) for name in names],
        "several",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in names],
        [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, shape) for name in names],
    )
    opsets = [helper.make_opsetid("", _OPSET)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=_IR_VERSION).SerializeToString())
