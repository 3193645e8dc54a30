"""``int8-dynamic``: matrix products as int8, the scale of each activation found as it comes."""

from collections.abc import Sequence
from pathlib import Path

from weft.optimize.methods.integer_matmul import KINDS, quantize_products
from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import (
    has_gpu_instances,
    keep_layer_norms,
    read_model,
    save_model,
    why_not_quantizable,
)


class Int8Dynamic:
    """Dynamic quantisation: needs no calibration. An answer depends on the rows that share its batch.

    Convolutions stay in FP32: ONNX Runtime's ``ConvInteger`` is slower than that on CPUs.
    """

    name = "int8-dynamic"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if a MatMul or Gemm has a constant weight, and the model runs on CPUs."""
        if has_gpu_instances(source):
            return "ONNX Runtime multiplies integers of this form on CPUs alone, and the model has instances on a GPU"
        return why_not_quantizable(source, KINDS)

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the quantised model."""
        model = read_model(source)
        keep_layer_norms(model)
        count = quantize_products(model, None)
        save_model(model, folder / source.file.name)
        return Built({}, f"{count} matrix products as int8, per output channel; activations as they come")
