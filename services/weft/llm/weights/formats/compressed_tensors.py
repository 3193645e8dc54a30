"""compressed-tensors, as llm-compressor and vLLM save it: packed codes of 4 and 8 bits, 8-bit whole numbers, or fp8.

Of a module ``X`` with ``b`` bits: ``X.weight_packed`` int32 ``[out, in b / 32]``, the lowest bits first, or
``X.weight`` int8; ``X.weight_scale`` ``[out, groups]``; ``X.weight_zero_point``, packed along the outputs or int8;
``X.weight_g_idx``, the group of each input; ``X.weight_shape``. Codes are packed plus half of their range.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from weft.llm.weights.checkpoint import (
    FLOATS,
    Checkpoint,
    ReadWeight,
    StoredTensor,
    WeightFormat,
    bytes_of,
    halves_of,
    num_groups,
    permutation_of,
    scales_of,
    wrong,
)
from weft.llm.weights.formats.bitsandbytes import unsigned
from weft.llm.weights.formats.float8 import Float8
from weft_kernels.linear.quantized import NUM_BITS, QuantizedWeight, pack


@dataclass(frozen=True)
class CompressedTensors(WeightFormat):
    """Reader of compressed-tensors; the type of each layer is that of its tensors.

    Attributes:
        float8: Reader of its layers of 8-bit floating point.
    """

    float8: Float8 = field(default_factory=Float8)
    name = "compressed-tensors"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether there are packed codes, or a weight of 8 bits."""
        if checkpoint.find(f"{module}.weight_packed") is not None or self.float8.is_quantized(module, checkpoint):
            return True
        stored = checkpoint.find(f"{module}.weight")
        return stored is not None and stored.dtypes == ("I8",)

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """Codes and scales; zero points and groups of inputs where they are stored."""
        if self.float8.is_quantized(module, checkpoint):
            return self.float8.tensors(module, shape, checkpoint)
        outputs, inputs = shape
        groups = num_groups(module, f"{module}.weight_scale", 1, inputs, checkpoint)
        scales = checkpoint.find(f"{module}.weight_scale")
        is_whole = scales is not None and scales.shape == (1, 1)
        wanted = {f"{module}.weight_scale": StoredTensor((1 if is_whole else outputs, groups), FLOATS)}
        if (packed := checkpoint.find(f"{module}.weight_packed")) is not None:
            bits = self._bits(packed, inputs)
            if inputs * bits % 32:
                raise wrong(f"{module}.weight_packed", f"of a multiple of {32 // bits} inputs", inputs)
            wanted[f"{module}.weight_packed"] = StoredTensor((outputs, inputs * bits // 32), ("I32",))
            zeros = StoredTensor((-(-outputs * bits // 32), groups), ("I32",))
        else:
            wanted[f"{module}.weight"] = StoredTensor(shape, ("I8",))
            zeros = StoredTensor((outputs, groups), ("I8",))
        if checkpoint.find(f"{module}.weight_zero_point") is not None:
            wanted[f"{module}.weight_zero_point"] = zeros
        if checkpoint.find(f"{module}.weight_g_idx") is not None:
            wanted[f"{module}.weight_g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return wanted

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> ReadWeight:
        """The weight; fp8 as numbers."""
        if self.float8.is_quantized(module, checkpoint):
            return self.float8.read(module, shape, checkpoint)
        outputs, inputs = shape
        scales = scales_of(checkpoint.read(f"{module}.weight_scale").expand(outputs, -1).t())
        group_size = inputs // scales.shape[0]
        bits, codes = self._codes(module, shape, checkpoint)
        permutation, zeros = None, None
        if checkpoint.find(f"{module}.weight_g_idx") is not None:
            g_idx = checkpoint.read(f"{module}.weight_g_idx")
            permutation = permutation_of(f"{module}.weight_g_idx", g_idx, group_size)
        if permutation is not None:
            codes = codes[permutation]
        if checkpoint.find(f"{module}.weight_zero_point") is not None:
            stored = checkpoint.read(f"{module}.weight_zero_point")
            if stored.dtype == torch.int8:
                zeros = unsigned(stored).t()
            else:
                narrow = bytes_of(stored.t()).flatten(1)
                zeros = (halves_of(narrow) if bits == 4 else narrow)[:, :outputs]
            zeros = zeros.to(scales.dtype).contiguous()
        return QuantizedWeight(
            codes=pack(codes, bits),
            scales=scales,
            zeros=zeros,
            lookup=None,
            group_size=group_size,
            shape=shape,
            num_bits=bits,
            permutation=permutation,
        )

    def ignored(self, module: str) -> Iterable[str]:
        """Scales of activations, and the shape, which the configuration has as well."""
        names = ("weight_shape", "input_zero_point", "weight_g_idx")
        return (*self.float8.ignored(module), *(f"{module}.{name}" for name in names))

    def _codes(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> tuple[int, torch.Tensor]:
        """Bits, and the codes one per byte, ``[in, out]``."""
        packed = checkpoint.find(f"{module}.weight_packed")
        if packed is None:
            return 8, unsigned(checkpoint.read(f"{module}.weight")).t()
        bits = self._bits(packed, shape[1])
        narrow = bytes_of(checkpoint.read(f"{module}.weight_packed")).flatten(1)
        return bits, (halves_of(narrow) if bits == 4 else narrow).t()

    @staticmethod
    def _bits(packed: StoredTensor, inputs: int) -> int:
        columns = packed.shape[1] if len(packed.shape) == 2 else 0
        return next((bits for bits in NUM_BITS if columns * 32 == inputs * bits), NUM_BITS[0])
