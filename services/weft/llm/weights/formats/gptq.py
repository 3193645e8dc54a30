"""GPTQ, as AutoGPTQ and GPTQModel save it: codes packed along the inputs, and groups that need not be neighbours.

Frantar et al., "GPTQ", 2022. Of a module ``X`` with ``b`` bits: ``X.qweight`` int32 ``[in b / 32, out]`` has ``32 / b``
inputs in each word, the lowest bits first; ``X.qzeros`` int32 ``[groups, out b / 32]`` as many outputs; ``X.scales``
``[groups, out]``; ``X.g_idx`` int32 ``[in]``, the group of each input. The first version stores each zero point less 1.
"""

from dataclasses import dataclass

from typing_extensions import override

from weft.llm.weights.checkpoint import Module, StoredTensor, WeightFormat
from weft.llm.weights.codes import bytes_of, halves_of, scales_of
from weft_kernels.linear.quantized import NUM_BITS, QuantizedWeight, pack


@dataclass(frozen=True)
class Gptq(WeightFormat):
    """Reader of GPTQ.

    Attributes:
        num_bits: Of a code, unless the shape of a layer says otherwise.
        is_v2: Zero points are stored as they are.
        has_order: Groups are not contiguous, so the group of each input is required.
    """

    num_bits: int
    is_v2: bool = False
    has_order: bool = False
    name = "gptq"
    ignored = ("bias",)  # early versions save one of zeros for every layer

    @override
    def is_quantized(self, module: Module) -> bool:
        return module.find("qweight") is not None

    @override
    def tensors(self, module: Module) -> dict[str, StoredTensor]:
        outputs, inputs = module.shape
        groups, bits = module.num_groups("scales", 0), self._bits(module)
        if inputs * bits % 32 or outputs * bits % 32:
            allowed = f"of a weight whose sides are multiples of {32 // bits}"
            raise module.wrong("qweight", allowed, list(module.shape))
        wanted = {
            "qweight": StoredTensor((inputs * bits // 32, outputs), ("I32",)),
            "qzeros": StoredTensor((groups, outputs * bits // 32), ("I32",)),
            "scales": StoredTensor((groups, outputs)),
        }
        if self.has_order or module.find("g_idx") is not None:
            wanted["g_idx"] = StoredTensor((inputs,), ("I32", "I64"))
        return wanted

    @override
    def read(self, module: Module) -> QuantizedWeight:
        outputs, inputs = module.shape
        scales = scales_of(module.read("scales"))
        group_size, bits = inputs // scales.shape[0], self._bits(module)
        codes = bytes_of(module.read("qweight")).permute(0, 2, 1).reshape(-1, outputs)
        permutation = module.permutation("g_idx", group_size)
        if permutation is not None:
            codes = halves_of(codes.t()).t() if bits == 4 else codes
            codes = pack(codes[permutation], bits)
        zeros = bytes_of(module.read("qzeros")).flatten(1)
        if bits == 4:
            zeros = halves_of(zeros)
        if not self.is_v2:
            zeros = zeros + 1 & 2**bits - 1
        is_symmetric = bool((zeros == 2 ** (bits - 1)).all())
        return QuantizedWeight(
            codes=codes.contiguous(),
            scales=scales,
            zeros=None if is_symmetric else zeros.to(scales.dtype).contiguous(),
            group_size=group_size,
            shape=module.shape,
            num_bits=bits,
            permutation=permutation,
        )

    def _bits(self, module: Module) -> int:
        """Bits of a code, derived from the shape of the codes: layers may differ."""
        stored = module.find("qweight")
        rows = stored.shape[0] if stored is not None and stored.shape else 0
        return next((bits for bits in NUM_BITS if rows * 32 == module.shape[1] * bits), self.num_bits)
