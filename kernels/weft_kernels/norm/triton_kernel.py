"""Root-mean-square normalisation fused with the residual addition; one program per row."""

import torch
import triton
import triton.language as tl

MAX_COLUMNS = 65536
"""Longest row: a program keeps the whole row in registers."""


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    residual_out_ptr,
    num_columns,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.arange(0, BLOCK)
    mask = offs < num_columns
    start = tl.program_id(0).to(tl.int64) * num_columns
    x = tl.load(x_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + start + offs, mask=mask, other=0.0).to(tl.float32)
        stored = x.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + start + offs, stored, mask=mask)
        x = stored.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / num_columns + eps)
    weight = tl.load(weight_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + start + offs, (x * scale * weight).to(y_ptr.dtype.element_ty), mask=mask)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise every row to unit root mean square, after adding the residual stream if given.

    A row is read once and a program sees no other row, so its result never depends on the batch.

    Args:
        x: Shape ``[num_rows, d]``, float32, float16 or bfloat16, contiguous. Not modified.
        weight: Gain of each column, shape ``[d]``, contiguous.
        eps: Added to the mean square.
        residual: Shape, dtype and device of ``x``, contiguous, or None. Not modified.

    Returns:
        ``(y, residual_out)`` as `weft_kernels.norm.reference.rms_norm`.

    Raises:
        ValueError: ``x`` is not 2-D or longer than `MAX_COLUMNS`, a shape or dtype does not fit, or a tensor is not
            contiguous.
    """
    if x.ndim != 2 or not 1 <= x.shape[1] <= MAX_COLUMNS:
        raise ValueError(f"x must be [num_rows, d] with d from 1 to {MAX_COLUMNS}; got shape {tuple(x.shape)}")
    num_rows, num_columns = x.shape
    if weight.shape != (num_columns,):
        raise ValueError(f"weight must have shape [{num_columns}], a gain of each column; got {tuple(weight.shape)}")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual must be {x.dtype} {tuple(x.shape)} as x; got {residual.dtype} {tuple(residual.shape)}"
        )
    if not (x.is_contiguous() and weight.is_contiguous() and (residual is None or residual.is_contiguous())):
        raise ValueError("x, weight and residual must be contiguous; call .contiguous() first")
    y = torch.empty_like(x)
    residual_out = x if residual is None else torch.empty_like(x)
    if num_rows:
        block = triton.next_power_of_2(num_columns)
        _rms_norm_kernel[(num_rows,)](
            x,
            residual,
            weight,
            y,
            residual_out,
            num_columns,
            eps,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return y, residual_out
