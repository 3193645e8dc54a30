"""Methods that store weights in fewer bits: ``fp16``, ``int8-weights`` and ``int4-weights``."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.capi import _pybind_state as kernels
from onnxruntime.transformers.float16 import convert_float_to_float16

from weft.optimize.methods.integer_matmul import KINDS, Product, find_products
from weft.optimize.methods.method import Inputs, OptimizationMethod, SourceModel
from weft.optimize.methods.onnx_model import (
    MICROSOFT,
    add_constant,
    keep_layer_norms,
    onnx_method,
    replace_nodes,
    why_not_quantizable,
)

#: Weights that share a scale.
_BLOCK = 32
#: Activations are rounded to int8, block by block and row by row.
_INT8_ACCURACY = 4
#: Constants of fewer values stay in FP32.
_FEWEST_VALUES = 256
_LARGEST_HALF = float(np.finfo(np.float16).max)


def _block_weights(bits: int, pack: Any) -> OptimizationMethod:
    """A scale for each 32 weights of an output channel, and for as many values of a row: small, and close to FP32.

    Fast where few rows come at once; with many rows ``int8-static`` is the faster. An answer does not depend on other
    rows. ``onnxruntime.quantization.matmul_nbits_quantizer`` writes the same and needs the package ``onnx_ir``; the
    packing is ONNX Runtime's.
    """

    def rewrite(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
        keep_layer_norms(model)
        products = {product.node.name: product for product in find_products(model)}
        merged = {product.add.name for product in products.values() if product.add is not None}
        nodes = [
            packed(model, products[node.name]) if node.name in products else node
            for node in model.graph.node
            if node.name not in merged
        ]
        replace_nodes(model, nodes)
        return model, f"weights of {len(products)} matrix products in {bits} bits, a scale for each {_BLOCK}"

    def packed(model: Any, product: Product) -> Any:
        name, (num_inputs, num_outputs) = product.node.name, product.weight.shape
        num_blocks = -(-num_inputs // _BLOCK)
        weights = np.zeros((num_outputs, num_blocks, _BLOCK * bits // 8), np.uint8)
        scales = np.zeros(num_outputs * num_blocks, np.float32)
        zeros = np.zeros(num_outputs * -(-num_blocks * bits // 8), np.uint8)  # symmetric: not written, not stored
        pack(weights, np.ascontiguousarray(product.weight), scales, zeros, _BLOCK, num_outputs, num_inputs, True)
        inputs = [product.x, add_constant(model, f"{name}.packed", weights)]
        inputs += [add_constant(model, f"{name}.scales", scales), *(["", "", product.bias] if product.bias else [])]
        return helper.make_node(
            "MatMulNBits",
            inputs,
            [product.output],
            name=name,
            domain=MICROSOFT,
            K=num_inputs,
            N=num_outputs,
            bits=bits,
            block_size=_BLOCK,
            accuracy_level=_INT8_ACCURACY,
        )

    return onnx_method(f"int{bits}-weights", lambda model, _: why_not_quantizable(model, KINDS), rewrite)


def _large_tensors(model: Any) -> list[Any]:
    return [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= _FEWEST_VALUES
    ]


def _why_not_half(model: Any, source: SourceModel) -> str:
    return "" if _large_tensors(model) else "no constant of FP32 is large enough to matter"


def _half(model: Any, source: SourceModel, calibration: Sequence[Inputs]) -> tuple[Any, str]:
    if source.has_gpu_instances():
        return convert_float_to_float16(model, keep_io_types=True), "FP16 between inputs and outputs"
    casts, num_outside = [], 0
    for tensor in _large_tensors(model):
        value = numpy_helper.to_array(tensor)
        if not np.abs(value).max() <= _LARGEST_HALF:
            num_outside += 1
            continue
        name = f"{tensor.name}.fp16"
        # A Cast that ONNX Runtime computes once, as it loads the file.
        casts.append(helper.make_node("Cast", [name], [tensor.name], name=name, to=onnx.TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float16), name))
    replace_nodes(model, [*casts, *model.graph.node])
    return model, f"{len(casts)} constants stored as FP16, {num_outside} beyond its range in FP32; arithmetic in FP32"


#: Half the file, for the same cost and memory on CPUs; inputs and outputs stay FP32. ONNX Runtime has no FP16
#: arithmetic on x86 CPUs: weights become FP32 again as the file is loaded. On a GPU all between them is FP16.
FP16 = onnx_method("fp16", _why_not_half, _half)
INT8_WEIGHTS = _block_weights(8, kernels.quantize_matmul_8bits)
INT4_WEIGHTS = _block_weights(4, kernels.quantize_matmul_4bits)
