"""Root-mean-square normalisation in plain torch: the CPU implementation, and the kernel's test oracle."""

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch's own documentation gives it


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise every row to unit root mean square, after adding the residual stream if given.

    A row's result depends on that row alone, bit for bit.

    Args:
        x: Shape ``[num_rows, d]``, float32, float16 or bfloat16. Not modified.
        weight: Gain of each column, shape ``[d]``.
        eps: Added to the mean square, so that a row of zeros stays zeros.
        residual: Shape and dtype of ``x``, or None. Not modified.

    Returns:
        ``(y, residual_out)``, both of the shape and dtype of ``x``. ``residual_out`` is ``x + residual`` rounded to
        that dtype, or ``x`` itself without a residual; ``y`` is ``residual_out`` normalised and times ``weight``,
        computed in float32 and rounded once.
    """
    residual_out = x if residual is None else x + residual
    y = F.rms_norm(residual_out.float(), weight.shape, weight.float(), eps)
    return y.to(x.dtype), residual_out
