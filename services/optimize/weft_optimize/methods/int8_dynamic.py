"""``int8-dynamic``: weights of matrix products as int8, activations quantised as they come."""

from collections.abc import Sequence
from pathlib import Path

from onnxruntime.quantization import QuantType, quantize_dynamic

from weft_optimize.methods.method import Built, Inputs, SourceModel
from weft_optimize.methods.onnx_model import read_model, weighted_nodes, why_not_quantizable

# Convolutions with activations that are quantised as they come (ConvInteger) are slower than in fp32 on CPUs.
_KINDS = ("MatMul", "Gemm")


class Int8Dynamic:
    """Dynamic quantisation of ONNX Runtime, one scale for each output channel. Needs no calibration."""

    name = "int8-dynamic"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if a MatMul or Gemm has a constant weight."""
        return why_not_quantizable(source, _KINDS)

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the quantised model."""
        nodes = [node.name for node in weighted_nodes(read_model(source), _KINDS)]
        quantize_dynamic(
            source.file,
            folder / source.file.name,
            op_types_to_quantize=list(_KINDS),
            per_channel=True,
            weight_type=QuantType.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
        return Built({}, f"{len(nodes)} matrix products to int8, per channel; activations when they come")
