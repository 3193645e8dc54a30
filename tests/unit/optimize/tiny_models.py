"""Models of a few thousand weights as ONNX files: a perceptron, a transformer's block, a convolutional network."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper

from weft.optimize.methods.method import Inputs, SourceModel
from weft_protos.model_config_pb2 import ModelConfig

WIDTH, NUM_HEADS = 32, 4


class Graph:
    """Nodes and constants, written one after another; weights are random with a fixed seed."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}
        self._draw = np.random.default_rng(0)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        output = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants[name] = np.asarray(value)
        return name

    def weight(self, *shape: int, skew: bool = False) -> str:
        value = self._draw.normal(size=shape).astype(np.float32) / np.float32(shape[0]) ** 0.5
        if skew:
            value[::8] *= 30
        return self.constant(value)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        return self.op("Add", self.op("MatMul", x, self.weight(inputs, outputs)), self.weight(outputs))

    def save(self, path: Path, inputs: list[Any], outputs: dict[str, tuple[str, list[Any]]]) -> None:
        for name, (value, _) in outputs.items():
            self.nodes.append(helper.make_node("Identity", [value], [name]))
        graph = helper.make_graph(
            self.nodes,
            "tiny",
            inputs,
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, (_, shape) in outputs.items()],
            [numpy_helper.from_array(value, name) for name, value in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        onnx.checker.check_model(model)
        onnx.save(model, path)


def save_perceptron(path: Path) -> None:
    """X ``[batch, 32]`` to Y ``[batch, 8]``, two Gemm."""
    g = Graph()
    hidden = g.op("Relu", g.op("Gemm", "X", g.weight(64, WIDTH), g.weight(64), transB=1))
    y = g.op("Gemm", hidden, g.weight(64, 8), g.weight(8))
    g.save(path, [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", WIDTH])], {"Y": (y, ["batch", 8])})


def save_block(path: Path) -> None:
    """X ``[batch, length, 32]`` and MASK to Y of X's shape: attention and feed-forward; some channels are large."""
    g = Graph()
    x = g.op("LayerNormalization", "X", g.weight(WIDTH, skew=True), g.weight(WIDTH), axis=-1)
    one, size = g.constant(np.float32(1)), WIDTH // NUM_HEADS
    axes = [g.constant(np.array([axis])) for axis in (1, 2)]
    mask = g.op("Cast", g.op("Unsqueeze", g.op("Unsqueeze", "MASK", axes[0]), axes[1]), to=TensorProto.FLOAT)
    mask = g.op("Mul", g.op("Sub", one, mask), g.constant(np.float32(-10000)))
    split = g.constant(np.array([0, 0, NUM_HEADS, size]))
    query, key, value = (
        g.op("Transpose", g.op("Reshape", g.linear(x, WIDTH, WIDTH), split), perm=perm)
        for perm in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3])
    )
    scores = g.op("Div", g.op("MatMul", query, key), g.constant(np.float32(size**0.5)))
    context = g.op("MatMul", g.op("Softmax", g.op("Add", scores, mask), axis=-1), value)
    merged = g.op("Reshape", g.op("Transpose", context, perm=[0, 2, 1, 3]), g.constant(np.array([0, 0, WIDTH])))
    x = g.op("Add", g.linear(merged, WIDTH, WIDTH), x)
    x = g.op("LayerNormalization", x, g.weight(WIDTH, skew=True), g.weight(WIDTH), axis=-1)
    inner = g.op("Relu", g.linear(x, WIDTH, 64))
    x = g.op("Add", g.linear(inner, 64, WIDTH), x)
    y = g.op("LayerNormalization", x, g.weight(WIDTH), g.weight(WIDTH), axis=-1)
    inputs = [
        helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", "length", WIDTH]),
        helper.make_tensor_value_info("MASK", TensorProto.INT64, ["batch", "length"]),
    ]
    g.save(path, inputs, {"Y": (y, ["batch", "length", WIDTH])})


def save_convolutions(path: Path) -> None:
    """X ``[batch, 3, 8, 8]`` to Y ``[batch, 8]``: two convolutions, one with a batch norm, and a product."""
    g = Graph()
    x = g.op("Conv", "X", g.weight(16, 3, 3, 3), g.weight(16), pads=[1, 1, 1, 1])
    ones = [g.constant(np.ones(16, np.float32)) for _ in range(4)]
    x = g.op("Relu", g.op("BatchNormalization", x, *ones))
    x = g.op("Relu", g.op("Conv", x, g.weight(16, 16, 3, 3), g.weight(16), pads=[1, 1, 1, 1]))
    x = g.op("Flatten", g.op("GlobalAveragePool", x))
    y = g.op("Gemm", x, g.weight(16, 8), g.weight(8))
    g.save(path, [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 3, 8, 8])], {"Y": (y, ["batch", 8])})


def save_sum(path: Path) -> None:
    """X + X: nothing to optimise."""
    g = Graph()
    y = g.op("Add", "X", "X")
    g.save(path, [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["batch", 4])], {"Y": (y, ["batch", 4])})


def source(
    folder: Path, save: Callable[[Path], None], config: str = "instance_group { kind: KIND_CPU }"
) -> SourceModel:
    """The model as version 1 of a repository."""
    version = folder / "tiny" / "1"
    version.mkdir(parents=True)
    save(version / "model.onnx")
    parsed = text_format.Parse(f'name: "tiny" max_batch_size: 8 {config}', ModelConfig())
    return SourceModel("tiny", version, parsed, version / "model.onnx")


def batches(model: SourceModel, count: int = 3) -> list[Inputs]:
    """Random inputs, batches of 4 to 6 rows, for a block of 5 to 7 tokens, the last of which is padding."""
    draw = np.random.default_rng(1)
    found: list[Inputs] = []
    for number in range(count):
        batch: dict[str, Any] = {}
        for value in onnx.load(model.file).graph.input:
            dims = [
                dim.dim_value or 4 + number + (dim.dim_param == "length") for dim in value.type.tensor_type.shape.dim
            ]
            batch[value.name] = draw.normal(size=dims).astype(np.float32)
            if value.name == "MASK":
                batch["MASK"] = np.ones(dims, np.int64)
                batch["MASK"][:, -1] = 0
        found.append(batch)
    return found
