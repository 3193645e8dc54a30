"""GPTQ, as AutoGPTQ and GPTQModel save it: codes packed along the inputs, and groups that need not be neighbours.

Frantar et al., "GPTQ", 2022. Of a module ``X`` with ``b`` bits: ``X.qweight`` int32 ``[in b / 32, out]`` has ``32 / b``
inputs in each word, the lowest bits first; ``X.qzeros`` int32 ``[groups, out b / 32]`` as many outputs; ``X.scales``
``[groups, out]``; ``X.g_idx`` int32 ``[in]``, the group of each input. The first version stores each zero point less 1.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from weft.llm.weights.checkpoint import (
    FLOATS,
    Checkpoint,
    StoredTensor,
    WeightFormat,
    bytes_of,
    halves_of,
    num_groups,
    permutation_of,
    scales_of,
    wrong,
)
from weft_kernels.linear.quantized import NUM_BITS, QuantizedWeight, pack


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """Reader of GPTQ.

    Attributes:
        num_bits: Of a code, unless the shape of a layer says otherwise.
        is_v2: Zero points are stored as they are.
        has_order: Groups are not of neighbours, so that the group of each input has to be there.
    """

    num_bits: int
    is_v2: bool = False
    has_order: bool = False
    name = "gptq"

    def is_quantized(self, module: str, checkpoint: Checkpoint) -> bool:
        """Whether there is a ``qweight``."""
        return checkpoint.find(f"{module}.qweight") is not None

    def tensors(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> dict[str, StoredTensor]:
        """Codes, zero points, scales, and the groups of inputs where they are stored."""
        outputs, inputs = shape
        groups = num_groups(module, f"{module}.scales", 0, inputs, checkpoint)
        bits = self._bits(module, inputs, checkpoint)
        if inputs * bits % 32 or outputs * bits % 32:
            raise wrong(f"{module}.qweight", f"of a weight whose sides are multiples of {32 // bits}", list(shape))
        wanted = {
            f"{module}.qweight": StoredTensor((inputs * bits // 32, outputs), ("I32",)),
            f"{module}.qzeros": StoredTensor((groups, outputs * bits // 32), ("I32",)),
            f"{module}.scales": StoredTensor((groups, outputs), FLOATS),
        }
        if self.has_order or checkpoint.find(f"{module}.g_idx") is not None:
            wanted[f"{module}.g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return wanted

    def read(self, module: str, shape: tuple[int, int], checkpoint: Checkpoint) -> QuantizedWeight:
        """The weight; its inputs permuted where those of a group are not neighbours."""
        outputs, inputs = shape
        scales = scales_of(checkpoint.read(f"{module}.scales"))
        group_size, bits = inputs // scales.shape[0], self._bits(module, inputs, checkpoint)
        codes = bytes_of(checkpoint.read(f"{module}.qweight")).permute(0, 2, 1).reshape(-1, outputs)
        permutation = None
        if checkpoint.find(f"{module}.g_idx") is not None:
            permutation = permutation_of(f"{module}.g_idx", checkpoint.read(f"{module}.g_idx"), group_size)
        if permutation is not None:
            codes = halves_of(codes.t()).t() if bits == 4 else codes
            codes = pack(codes[permutation], bits)
        zeros = bytes_of(checkpoint.read(f"{module}.qzeros")).flatten(1)
        if bits == 4:
            zeros = halves_of(zeros)
        if not self.is_v2:
            zeros = zeros + 1 & 2**bits - 1
        is_symmetric = bool((zeros == 2 ** (bits - 1)).all())
        return QuantizedWeight(
            codes=codes.contiguous(),
            scales=scales,
            zeros=None if is_symmetric else zeros.to(scales.dtype).contiguous(),
            lookup=None,
            group_size=group_size,
            shape=shape,
            num_bits=bits,
            permutation=permutation,
        )

    def ignored(self, module: str) -> Iterable[str]:
        """Early versions save a bias of zeros for every layer."""
        return (f"{module}.bias",)

    def _bits(self, module: str, inputs: int, checkpoint: Checkpoint) -> int:
        """Bits of a code: layers may differ, and the shape of the codes says how."""
        stored = checkpoint.find(f"{module}.qweight")
        rows = stored.shape[0] if stored is not None and stored.shape else 0
        return next((bits for bits in NUM_BITS if rows * 32 == inputs * bits), self.num_bits)
