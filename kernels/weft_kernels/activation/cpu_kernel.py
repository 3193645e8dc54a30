"""Gated activations on a CPU, compiled with numba; see ``reference``."""

from typing import Any

import numpy as np
import torch

from weft_kernels import numbers
from weft_kernels.jit import jit_with
from weft_kernels.numbers import LIKE, at, nearest, of_bits, read, write

_LOG2_E = np.float32(1.4426950408889634)
#: Taylor coefficients of 2**x, from x**7 on down; exact to 2e-8 for x up to 0.5 in magnitude.
_C7, _C6, _C5, _C4 = (np.float32(each) for each in (1.525273e-5, 1.5403530e-4, 1.33335581e-3, 9.61812911e-3))
_C3, _C2, _C1 = (np.float32(each) for each in (5.55041087e-2, 2.40226507e-1, 6.93147181e-1))
_ONE = np.float32(1)
_GELU_1, _GELU_3 = np.float32(1.5957691216057308), np.float32(0.07135481627260025)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``reference.silu_mul``, in float32 or bfloat16."""
    return _gated(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As ``reference.gelu_tanh_mul``, in float32 or bfloat16."""
    return _gated(gate_up, is_gelu=True)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """As ``reference.clamped_swiglu``, in float32 or bfloat16."""
    return _gated(gate_up, alpha=alpha, limit=limit)


def _gated(gate_up: torch.Tensor, *, is_gelu: bool = False, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    gate_up = gate_up.contiguous()
    num_rows, both = gate_up.shape
    out = gate_up.new_empty(num_rows, both // 2)
    _gate(
        LIKE[gate_up.dtype],
        gate_up.data_ptr(),
        out.data_ptr(),
        num_rows,
        both // 2,
        is_gelu,
        float(alpha),
        float(limit),
    )
    return out


@jit_with(numbers)
def _gate(
    like: Any, gate_up: int, out: int, num_rows: int, size: int, is_gelu: bool, alpha: float, limit: float
) -> None:
    factor, most = np.float32(alpha), np.float32(limit)
    for row in range(num_rows):
        first = gate_up + 2 * row * size * like.itemsize
        gates, ups = at(first, size, like), at(first + size * like.itemsize, size, like)
        result = at(out + row * size * like.itemsize, size, like)
        for place in range(size):
            gate, up = read(gates, place), read(ups, place)
            if most > 0:
                gate = most if gate > most else gate
                up = (most if up > most else -most if up < -most else up) + _ONE
            # (1 + tanh(z)) / 2 is sigmoid(2 z)
            inner = gate * (_GELU_1 + _GELU_3 * gate * gate) if is_gelu else factor * gate
            power = min(max(inner * -_LOG2_E, np.float32(-126)), np.float32(128))  # above, 2**128 is infinite
            whole = nearest(power)
            x = power - np.float32(whole)
            share = _ONE + x * (_C1 + x * (_C2 + x * (_C3 + x * (_C4 + x * (_C5 + x * (_C6 + x * _C7))))))
            write(result, place, gate / (_ONE + share * of_bits((whole + 127) << 23)) * up)
