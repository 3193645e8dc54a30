"""Choice of experts, and the sum of what they give, in plain torch: the oracle of the tests."""

import torch
from torch import Tensor

from weft_kernels.topk.reference import softmax_topk


def route(logits: Tensor, num_chosen: int, *, is_normalized: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The experts with the largest logits for each row, and an order of all these choices by expert, then by row.

    Args:
        logits: Of the router, ``[T, E]``, floating point. Not modified.
        num_chosen: k, 1 to E.
        is_normalized: Shares are a softmax over the chosen experts; else over all.

    Returns:
        ``(shares, rows, places, starts)``: float32 ``[T, k]``, the largest first, of equal ones that of the lower
        expert; the row at each place of the order, int64 ``[T * k]``; the place of each choice, int64 ``[T, k]``; the
        first place of each expert, then ``T * k``, int32 ``[E + 1]``. Shares of a row do not depend on other rows.
    """
    return sorted_by_expert(*softmax_topk(logits, num_chosen), logits.shape[1], is_normalized=is_normalized)


def sorted_by_expert(
    shares: Tensor, ids: Tensor, num_experts: int, *, is_normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result of ``route`` from shares and experts, ``[T, k]``; waits for no device."""
    if is_normalized:
        shares = shares / shares.cumsum(1)[:, -1:]  # in one order, whatever the number of rows
    flat = ids.flatten()
    experts, order = torch.sort(flat, stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=ids.device))
    edges = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    starts = torch.searchsorted(experts, edges, out_int32=True)
    return shares, order // ids.shape[1], places.view(ids.shape), starts


def combine(y: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Sum of the outputs of each row's experts, each times its share.

    Args:
        y: Outputs in the order of ``route``, ``[T * k, N]``, floating point. Not modified.
        places: Of ``route``, ``[T, k]``.
        shares: float32 ``[T, k]``.

    Returns:
        ``[T, N]``, dtype of ``y``, newly allocated. Summed in float32 in the order of the choices, so that a row does
        not depend on the others.
    """
    total = torch.zeros(places.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for place, share in zip(places.unbind(1), shares.unbind(1), strict=True):
        total.addcmul_(y.index_select(0, place).float(), share.unsqueeze(1))
    return total.to(y.dtype)
