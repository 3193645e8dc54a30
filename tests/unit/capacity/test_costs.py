"""Costs of models: counted by hand, or what the model itself has in memory."""

from pathlib import Path

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from weft.base.errors import InvalidArgumentError
from weft.base.signature import ModelSignature, TensorSpec
from weft.capacity.costs.language_model import LanguageModel
from weft.capacity.costs.onnx_model import OnnxModel
from weft.capacity.costs.torch_model import TorchModel
from weft.llm.config import EngineConfig
from weft.llm.models.llama import Mixtral
from weft.llm.models.model import TransformerModel
from weft.llm.models.model_config import TransformerConfig
from weft.llm.models.weights import random_weights

INPUTS, HIDDEN, OUTPUTS = 64, 128, 32
CONFIG = TransformerConfig(512, 64, 96, 3, 4, 2, 16, 256, rope={"rope_theta": 10000.0})
EXPERTS = Mixtral(**vars(CONFIG) | {"num_experts": 6, "num_chosen": 2, "expert_size": 96})


def signature(dims: tuple[int, ...]) -> ModelSignature:
    """One input ``x``, a batch of 8."""
    return ModelSignature(
        "m", "1", "onnxruntime", 8, (TensorSpec("x", "FP32", dims),), (TensorSpec("y", "FP32", (OUTPUTS,)),)
    )


def write_perceptron(path: Path) -> None:
    """Two products with a Relu between them."""
    first, second = np.ones((INPUTS, HIDDEN), np.float32), np.ones((HIDDEN, OUTPUTS), np.float32)
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "a"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "b"], ["y"]),
        ],
        "perceptron",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", OUTPUTS])],
        [numpy_helper.from_array(first, "a"), numpy_helper.from_array(second, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    path.write_bytes(model.SerializeToString())


def test_an_onnx_model_is_counted_by_its_graph(tmp_path: Path) -> None:
    """Operations, weights, their packed copies, and tensors that are alive together."""
    write_perceptron(tmp_path / "model.onnx")
    model = OnnxModel(tmp_path / "model.onnx", signature((INPUTS,)))
    weight_bytes = 4 * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)
    assert (model.weights.num_bytes, model.weights.packed_bytes) == (weight_bytes, weight_bytes)
    for rows in (1, 8):
        cost = model.batch(rows, {})
        products = [operation for operation in cost.operations if operation.family == "product"]
        assert sum(each.num_flops for each in products) == 2 * rows * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)
        assert sum(each.weight_bytes for each in products) == weight_bytes
        assert (cost.input_bytes, cost.output_bytes) == (4 * rows * INPUTS, 4 * rows * OUTPUTS)
        assert cost.peak_bytes == 4 * rows * 2 * HIDDEN  # the hidden layer before and after Relu


def test_an_input_that_does_not_fit_the_file_is_refused(tmp_path: Path) -> None:
    """With both shapes."""
    write_perceptron(tmp_path / "model.onnx")
    with pytest.raises(InvalidArgumentError, match=r"input 'x' has the shape \['batch', 64\], which \[2, 7\] does not"):
        OnnxModel(tmp_path / "model.onnx", signature((7,))).batch(2, {})


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff\xff", b"not a model"], ids=["empty", "bytes", "text"])
def test_a_file_that_is_no_model_is_refused(content: bytes, tmp_path: Path) -> None:
    """By its name."""
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=r"model\.onnx is no ONNX model"):
        OnnxModel(tmp_path / "model.onnx", signature((INPUTS,))).batch(1, {})


class Perceptron(torch.nn.Module):
    """The same as ``write_perceptron``."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(INPUTS, HIDDEN, bias=False)
        self.b = torch.nn.Linear(HIDDEN, OUTPUTS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def test_a_torch_program_is_counted_by_its_operators(tmp_path: Path) -> None:
    """Nothing is computed: the tensors have no memory."""
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Perceptron(), (torch.ones(2, INPUTS),), dynamic_shapes={"x": {0: batch}})
    torch.export.save(program, tmp_path / "model.pt2")
    model = TorchModel(tmp_path / "model.pt2", signature((INPUTS,)))
    assert model.weights.num_bytes == 4 * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)
    cost = model.batch(8, {})
    products = [operation for operation in cost.operations if operation.family == "product"]
    assert [each.shape for each in products] == [(8, INPUTS, HIDDEN), (8, HIDDEN, OUTPUTS)]
    assert sum(each.num_flops for each in products) == 2 * 8 * (INPUTS * HIDDEN + HIDDEN * OUTPUTS)


@pytest.mark.parametrize("config", [CONFIG, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_matrices_of_a_language_model_are_as_large_as_the_engine_makes_them(
    config: TransformerConfig, quantization: str
) -> None:
    """The engine counts its own the same way."""
    engine = EngineConfig(dtype="float32", quantization=quantization)
    made = TransformerModel(config, random_weights(config, 0), num_bits=engine.num_bits)
    assert LanguageModel(config, engine).matrix_bytes == made.matrix_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_the_cache_of_a_language_model_is_as_large_as_the_engine_makes_it(kv_cache_dtype: str) -> None:
    """Scales of 8-bit codes included."""
    engine = EngineConfig(dtype="float32", kv_cache_dtype=kv_cache_dtype, num_blocks=20)
    dtype = torch.int8 if kv_cache_dtype == "int8" else None
    kv = TransformerModel(CONFIG, random_weights(CONFIG, 0)).new_kv(20, engine.block_size, dtype)
    assert LanguageModel(CONFIG, engine).kv_bytes(1 << 40, 0) == kv.nbytes


def test_a_sequence_takes_whole_blocks_and_the_longest_fills_the_cache() -> None:
    """One block holds no tokens."""
    model = LanguageModel(CONFIG, EngineConfig(dtype="float32", block_size=16))
    block_bytes = 16 * model.kv_bytes_per_token
    assert [model.sequence_bytes(context) for context in (1, 16, 17)] == [block_bytes, block_bytes, 2 * block_bytes]
    assert model.largest_context(5 * block_bytes) == 4 * 16
    assert model.largest_context(1 << 40) == CONFIG.max_context_len
