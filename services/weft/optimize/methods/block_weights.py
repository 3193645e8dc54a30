"""``int4-weights`` and ``int8-weights``: weights in blocks of few bits, ONNX Runtime's ``MatMulNBits``."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper, numpy_helper
from onnxruntime.capi import _pybind_state as kernels

from weft.optimize.methods.integer_matmul import KINDS, Product, find_products
from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import (
    MICROSOFT,
    import_microsoft,
    keep_layer_norms,
    read_model,
    replace_nodes,
    save_model,
    why_not_quantizable,
)

#: Weights that share a scale.
_BLOCK = 32
#: Activations are rounded to int8, block by block and row by row.
_INT8_ACCURACY = 4


class BlockWeights:
    """A scale for each 32 weights of an output channel, and for as many values of a row: small, and close to FP32.

    Fast where few rows come at once; with many rows ``int8-static`` is the faster. An answer does not depend on other
    rows. ``onnxruntime.quantization.matmul_nbits_quantizer`` writes the same and needs the package ``onnx_ir``; the
    packing is ONNX Runtime's.

    Args:
        bits: 4 or 8.
    """

    def __init__(self, bits: int) -> None:
        self.name = f"int{bits}-weights"
        self._bits = bits
        self._pack = {4: kernels.quantize_matmul_4bits, 8: kernels.quantize_matmul_8bits}[bits]

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if a MatMul or Gemm has a constant weight."""
        return why_not_quantizable(source, KINDS)

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the model."""
        model = read_model(source)
        keep_layer_norms(model)
        products = {product.node.name: product for product in find_products(model)}
        merged = {product.add.name for product in products.values() if product.add is not None}
        nodes = [
            self._packed(model, products[node.name]) if node.name in products else node
            for node in model.graph.node
            if node.name not in merged
        ]
        replace_nodes(model, nodes)
        import_microsoft(model)
        save_model(model, folder / source.file.name)
        return Built({}, f"weights of {len(products)} matrix products in {self._bits} bits, a scale for each {_BLOCK}")

    def _packed(self, model: Any, product: Product) -> Any:
        name, (num_inputs, num_outputs) = product.node.name, product.weight.shape
        num_blocks = -(-num_inputs // _BLOCK)
        packed = np.zeros((num_outputs, num_blocks, _BLOCK * self._bits // 8), np.uint8)
        scales = np.zeros(num_outputs * num_blocks, np.float32)
        zeros = np.zeros(num_outputs * -(-num_blocks * self._bits // 8), np.uint8)  # symmetric: not written, not stored
        weight = np.ascontiguousarray(product.weight)
        self._pack(packed, weight, scales, zeros, _BLOCK, num_outputs, num_inputs, True)
        constants = {f"{name}.packed": packed, f"{name}.scales": scales}
        model.graph.initializer.extend(numpy_helper.from_array(value, key) for key, value in constants.items())
        return helper.make_node(
            "MatMulNBits",
            [product.x, *constants, "", "", product.bias] if product.bias else [product.x, *constants],
            [product.node.output[0] if product.add is None else product.add.output[0]],
            name=name,
            domain=MICROSOFT,
            K=num_inputs,
            N=num_outputs,
            bits=self._bits,
            block_size=_BLOCK,
            accuracy_level=_INT8_ACCURACY,
        )
