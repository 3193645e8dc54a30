"""Methods of optimisation by name, in the order in which they are tried; a new one is a module and a line here."""

from collections.abc import Mapping

from weft.optimize.methods.block_weights import BlockWeights
from weft.optimize.methods.fusion import Fusion
from weft.optimize.methods.half_weights import HalfWeights
from weft.optimize.methods.int8_dynamic import Int8Dynamic
from weft.optimize.methods.int8_mixed import Int8Mixed
from weft.optimize.methods.int8_static import Int8Smooth, Int8Static
from weft.optimize.methods.method import OptimizationMethod
from weft.optimize.methods.torch_int8 import TorchInt8
from weft.optimize.methods.torch_settings import TorchBf16, TorchCompile

METHODS: Mapping[str, OptimizationMethod] = {
    method.name: method
    for method in (
        Fusion(),
        HalfWeights(),
        BlockWeights(8),
        BlockWeights(4),
        Int8Dynamic(),
        Int8Static(),
        Int8Smooth(),
        Int8Mixed(),
        TorchBf16(),
        TorchInt8(),
        TorchCompile(),
    )
}
