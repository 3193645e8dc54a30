"""Rounding that looks at the inputs of a layer: Frantar et al., "GPTQ", 2022."""

import torch
from torch import Tensor

from weft_kernels.linear.quantized import QuantizedWeight, pack

_NUM_AT_ONCE = 128
#: Share of the mean of the diagonal that is added to it, so that it can be inverted.
_DAMPING = 0.01


def quantize_gptq(weight: Tensor, hessian: Tensor, rounded: QuantizedWeight) -> QuantizedWeight:
    """Choose codes so that the outputs change little: the error of each input is made up for by those after it.

    Inputs are taken by their energy, the largest first; groups stay those of neighbours ("static groups").

    Args:
        weight: ``[out, in]``, float32. Not modified.
        hessian: ``inputs.T @ inputs`` of rows that the layer gets, ``[in, in]``, float32 or float64. Not modified.
        rounded: The weight with each element rounded alone; its scales and zero points are used.
    """
    damped = hessian.double().clone()
    diagonal = damped.diagonal()
    diagonal += (_DAMPING * diagonal.mean()).clamp_min(1e-12)
    order = torch.argsort(diagonal, descending=True, stable=True)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped[order][:, order]))
    factor = torch.linalg.cholesky(inverse, upper=True).float()
    center = 2.0 ** (rounded.num_bits - 1)
    scales = rounded.scales.float()
    zeros = torch.full_like(scales, center) if rounded.zeros is None else rounded.zeros.float()
    left = weight.float().t()[order].contiguous()  # [in, out]
    codes = torch.empty_like(left)
    for start in range(0, len(left), _NUM_AT_ONCE):
        end = min(start + _NUM_AT_ONCE, len(left))
        errors = torch.empty_like(left[start:end])
        for place in range(start, end):
            group = int(order[place]) // rounded.group_size
            code = (left[place] / scales[group]).round_().add_(zeros[group]).clamp_(0, 2**rounded.num_bits - 1)
            error = (left[place] - (code - zeros[group]) * scales[group]) / factor[place, place]
            left[place + 1 : end] -= factor[place, place + 1 : end].unsqueeze(1) * error
            codes[order[place]], errors[place - start] = code, error
        left[end:] -= factor[start:end, end:].t() @ errors
    return QuantizedWeight(
        pack(codes, rounded.num_bits),
        rounded.scales,
        rounded.zeros,
        None,
        rounded.group_size,
        rounded.shape,
        rounded.num_bits,
    )
