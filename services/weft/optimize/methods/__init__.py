"""The table of optimisation methods, in the order in which they are tried; a new one is a module and a line."""

from collections.abc import Mapping

from weft.optimize.methods.fusion import FUSION
from weft.optimize.methods.int8 import INT8_DYNAMIC, INT8_MIXED, INT8_SMOOTH, INT8_STATIC
from weft.optimize.methods.method import OptimizationMethod
from weft.optimize.methods.torch_programs import TORCH_BF16, TORCH_COMPILE, TORCH_INT8
from weft.optimize.methods.weights import FP16, INT4_WEIGHTS, INT8_WEIGHTS

METHODS: Mapping[str, OptimizationMethod] = {
    method.name: method
    for method in (
        FUSION,
        FP16,
        INT8_WEIGHTS,
        INT4_WEIGHTS,
        INT8_DYNAMIC,
        INT8_STATIC,
        INT8_SMOOTH,
        INT8_MIXED,
        TORCH_BF16,
        TORCH_INT8,
        TORCH_COMPILE,
    )
}
