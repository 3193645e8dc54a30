"""ONNX files written node by node: the standard operators only, so that any ONNX runtime can read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

OPSET = 20
IR_VERSION = 9  # the version that belongs to opset 20; older runtimes refuse a newer one


def tensor(name: str, data_type: int, *shape: int | str) -> onnx.ValueInfoProto:
    """Description of an input or output; a string in ``shape`` names a dimension that varies."""
    return helper.make_tensor_value_info(name, data_type, shape)


def save_graph(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    *,
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Mapping[str, NDArray[Any]] | None = None,
) -> None:
    """``path`` holds the checked model; ``weights`` are its constants by name."""
    constants = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, path.parent.parent.name, inputs, outputs, constants)
    model = helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION, producer_name="weft"
    )
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
