"""Gated activations in plain torch: the CPU implementation, and the kernel's test oracle."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's own documentation gives it


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``, where the first half of each row is ``gate`` and the second half ``up``.

    A row's result depends on that row alone, bit for bit.

    Args:
        gate_up: Shape ``[num_rows, 2 * F]``, float32, float16 or bfloat16. Not modified.

    Returns:
        Shape ``[num_rows, F]``, dtype of ``gate_up``; computed in float32 and rounded once.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(gate_up.dtype)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``gelu(gate) * up`` with GELU's approximation by tanh; otherwise as ``silu_mul``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate.float(), approximate="tanh").mul_(up).to(gate_up.dtype)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float = 1.702, limit: float = 7.0) -> torch.Tensor:
    """``gate * sigmoid(alpha * gate) * (up + 1)``, after gates are at most ``limit``, ups from ``-limit`` to ``limit``.

    Otherwise as ``silu_mul``.
    """
    gate, up = gate_up.to(torch.float32, copy=True).chunk(2, dim=-1)
    gated = F.silu(gate.clamp_(max=limit).mul_(alpha)).div_(alpha)  # of rows that are apart, whose digits are their own
    return gated.mul_(up.clamp_(-limit, limit).add_(1.0)).to(gate_up.dtype)
