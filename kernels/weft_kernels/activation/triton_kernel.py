"""Gated activations; one program per tile of a row."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _gate_kernel(
    gate_up_ptr,
    out_ptr,
    num_columns,
    alpha,
    limit,
    IS_GELU: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < num_columns
    gate_ptr = gate_up_ptr + row * 2 * num_columns
    gate = tl.load(gate_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + num_columns + offs, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if IS_CLAMPED:
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1.0
        inner = tl.maximum(alpha * gate, -80.0)
    if IS_GELU:  # (1 + tanh(z)) / 2 is sigmoid(2 z)
        inner = tl.maximum(gate * (1.5957691216057308 + 0.07135481627260025 * gate * gate), -80.0)
    product = gate * tl.sigmoid(inner) * up
    tl.store(out_ptr + row * num_columns + offs, product.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where the first half of each row is ``gate`` and the second half ``up``.

    Args:
        gate_up: Shape ``[num_rows, 2 * F]``, float32, float16 or bfloat16, contiguous. Not modified.

    Returns:
        Shape ``[num_rows, F]``, dtype and device of ``gate_up``; computed in float32 and rounded once.

    Raises:
        ValueError: ``gate_up`` is not 2-D, has an odd number of columns, or is not contiguous.
    """
    return _gated(gate_up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with GELU's approximation by tanh; otherwise as ``silu_mul``."""
    return _gated(gate_up, is_gelu=True)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """As ``reference.clamped_swiglu``; otherwise as ``silu_mul``."""
    return _gated(gate_up, alpha=alpha, limit=limit)


def _gated(gate_up: torch.Tensor, *, is_gelu: bool = False, alpha: float = 1.0, limit: float = 0.0) -> torch.Tensor:
    if gate_up.ndim != 2 or gate_up.shape[1] == 0 or gate_up.shape[1] % 2:
        raise ValueError(f"gate_up must be [num_rows, 2 * F] with F at least 1; got shape {tuple(gate_up.shape)}")
    if not gate_up.is_contiguous():
        raise ValueError("gate_up must be contiguous; call .contiguous() first")
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, num_columns), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        block = min(triton.next_power_of_2(num_columns), _BLOCK)
        grid = (num_rows, triton.cdiv(num_columns, block))
        options = {"IS_GELU": is_gelu, "IS_CLAMPED": limit > 0, "BLOCK": block}
        _gate_kernel[grid](gate_up, out, num_columns, alpha, limit, **options)
    return out
