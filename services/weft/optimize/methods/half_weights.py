"""``fp16``: weights, and on a GPU everything between inputs and outputs, in 16 bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from onnxruntime.transformers.float16 import convert_float_to_float16

from weft.optimize.methods.method import Built, Inputs, SourceModel
from weft.optimize.methods.onnx_model import has_gpu_instances, read_model, replace_nodes, save_model, why_not_onnx

#: Smaller constants stay as they are.
_FEWEST_VALUES = 256
_LARGEST = float(np.finfo(np.float16).max)


class HalfWeights:
    """Half the file, for the same cost and memory on CPUs; inputs and outputs stay FP32.

    ONNX Runtime has no FP16 arithmetic on x86 CPUs: weights become FP32 again as the file is loaded.
    """

    name = "fp16"

    def unsuitable(self, source: SourceModel) -> str:
        """Empty if there are weights of FP32."""
        if why := why_not_onnx(source):
            return why
        return "" if _large_tensors(read_model(source)) else "no constant of FP32 is large enough to matter"

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Write the model."""
        model = read_model(source)
        if has_gpu_instances(source):
            save_model(convert_float_to_float16(model, keep_io_types=True), folder / source.file.name)
            return Built({}, "FP16 between inputs and outputs")
        count, left = _store_as_half(model)
        save_model(model, folder / source.file.name)
        return Built({}, f"{count} constants stored as FP16, {left} beyond its range in FP32; arithmetic in FP32")


def _large_tensors(model: Any) -> list[Any]:
    return [
        tensor
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) >= _FEWEST_VALUES
    ]


def _store_as_half(model: Any) -> tuple[int, int]:
    """Store constants as FP16 with a Cast that ONNX Runtime computes once; how many, and how many do not fit."""
    casts, outside = [], 0
    for tensor in _large_tensors(model):
        value = numpy_helper.to_array(tensor)
        if not np.abs(value).max() <= _LARGEST:
            outside += 1
            continue
        name = f"{tensor.name}.fp16"
        casts.append(helper.make_node("Cast", [name], [tensor.name], name=name, to=onnx.TensorProto.FLOAT))
        tensor.CopyFrom(numpy_helper.from_array(value.astype(np.float16), name))
    replace_nodes(model, [*casts, *model.graph.node])
    return len(casts), outside
