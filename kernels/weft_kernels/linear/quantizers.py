"""Rounding of weights to a few bits: each element to its nearest code."""

import torch
from torch import Tensor

from weft_kernels.linear.quantized import QuantizedWeight, pack

#: Values of the 16 codes of NormalFloat 4: quantiles of a normal distribution, scaled to -1 to 1, with an exact 0.
#: Dettmers et al., "QLoRA", 2023, appendix E.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_TINY = {torch.float32: torch.finfo(torch.float32).tiny, torch.float16: 2.0**-24}


#: Inputs that share a scale of 4 bits where nothing else is asked for.
GROUP_SIZE = 32


def quantize(weight: Tensor, num_bits: int) -> QuantizedWeight:
    """Round to what ``quantization`` of an engine means on a GPU, where activations stay numbers.

    Args:
        weight: ``[N, K]``, floating point, finite. Not modified.
        num_bits: 8: a scale for each output. 4: a scale and a zero point for each 32 inputs of an output, float16; if K
            is no multiple of 32, 8 bits.
    """
    if _has_groups(weight.shape[1], num_bits):
        return quantize_linear(weight, 4, GROUP_SIZE, is_symmetric=False, scales_dtype=torch.float16)
    return quantize_linear(weight, 8)


def quantized_bytes(shape: tuple[int, int], num_bits: int) -> int:
    """Memory of the result of ``quantize`` for a weight of the shape ``(N, K)``."""
    num_outputs, num_inputs = shape
    if _has_groups(num_inputs, num_bits):
        return num_outputs * (num_inputs // 2 + num_inputs // GROUP_SIZE * 4)
    return num_outputs * (num_inputs + 4)


def _has_groups(num_inputs: int, num_bits: int) -> bool:
    return num_bits == 4 and num_inputs % GROUP_SIZE == 0


def quantize_linear(
    weight: Tensor,
    num_bits: int,
    group_size: int = 0,
    *,
    is_symmetric: bool = True,
    scales_dtype: torch.dtype = torch.float32,
) -> QuantizedWeight:
    """Round to codes at equal distances.

    Relative error of normal weights (Frobenius norm): 8 bits a scale for each output 0.9 %, groups of 128 0.65 %;
    4 bits in groups of 128 11.8 %, asymmetric 10.0 %, in groups of 32 7.8 %.

    Args:
        weight: ``[N, K]``, floating point, finite. Not modified.
        num_bits: 4 or 8.
        group_size: Inputs that share a scale, a divisor of K. 0: K.
        is_symmetric: Codes are centred on 0, between the largest magnitude of a group and its negative; else they
            span the values of the group and 0, with a whole zero point.
        scales_dtype: float32 or float16; codes are those of the rounded scales.

    Raises:
        ValueError: Sizes do not fit one another.
    """
    groups = _grouped(weight, group_size)
    num_codes = 2**num_bits
    if is_symmetric:
        scales = _rounded(groups.abs().amax(1) / _positive_codes(num_bits), scales_dtype)
        zeros = None
        codes = (groups / scales.float().unsqueeze(1)).round_().add_(num_codes // 2)
    else:
        low, high = groups.amin(1).clamp_max_(0), groups.amax(1).clamp_min_(0)
        scales = _rounded((high - low) / (num_codes - 1), scales_dtype)
        zeros = (-low / scales.float()).round_().clamp_(0, num_codes - 1).to(scales_dtype)
        codes = (groups / scales.float().unsqueeze(1)).round_().add_(zeros.float().unsqueeze(1))
    codes = codes.clamp_(0, num_codes - 1)
    return _weight(weight, codes, scales, zeros, None, num_bits)


def quantize_nf4(weight: Tensor, group_size: int = 64, *, scales_dtype: torch.dtype = torch.float32) -> QuantizedWeight:
    """Round to the 16 values of NormalFloat 4; relative error of normal weights 9.2 % in groups of 64.

    Args:
        weight: ``[N, K]``, floating point, finite. Not modified.
        group_size: Inputs that share a scale, a divisor of K. 0: K.
        scales_dtype: float32 or float16; codes are those of the rounded scales.

    Raises:
        ValueError: Sizes do not fit one another.
    """
    groups = _grouped(weight, group_size)
    scales = _rounded(groups.abs().amax(1), scales_dtype)
    lookup = torch.tensor(NF4_VALUES, device=weight.device)
    codes = torch.bucketize(groups / scales.float().unsqueeze(1), (lookup[1:] + lookup[:-1]) / 2)
    return _weight(weight, codes, scales, None, lookup, 4)


def _positive_codes(num_bits: int) -> float:
    """Half the distance, in codes, of the largest value and its negative.

    At 4 bits the best is half a code more than there is above 0: the largest magnitude alone is rounded down.
    """
    return 127.0 if num_bits == 8 else 7.5


def _grouped(weight: Tensor, group_size: int) -> Tensor:
    """float32 ``[K / group_size, group_size, N]``."""
    num_outputs, num_inputs = weight.shape
    size = group_size or num_inputs
    if size < 1 or num_inputs % size:
        raise ValueError(f"group_size must divide the {num_inputs} inputs, got {group_size}")
    return weight.float().t().contiguous().view(-1, size, num_outputs)


def _rounded(scales: Tensor, dtype: torch.dtype) -> Tensor:
    return scales.to(dtype).clamp_min_(_TINY[dtype])


def _weight(
    weight: Tensor, codes: Tensor, scales: Tensor, zeros: Tensor | None, lookup: Tensor | None, num_bits: int
) -> QuantizedWeight:
    num_outputs, num_inputs = weight.shape
    return QuantizedWeight(
        codes=pack(codes.view(num_inputs, num_outputs), num_bits),
        scales=scales,
        zeros=zeros,
        lookup=lookup,
        group_size=codes.shape[1],
        shape=(num_outputs, num_inputs),
        num_bits=num_bits,
    )
