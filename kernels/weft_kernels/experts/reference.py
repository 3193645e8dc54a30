"""Rows of a mixture of experts, sorted by expert and put together again, in plain torch; also the test oracle."""

import torch
from torch import Tensor


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order in which the experts that rows have chosen multiply them: by expert, then by row.

    Args:
        ids: The experts of each row, no one twice, int32 ``[T, k]``, 0 to ``num_experts - 1``. Not modified.

    Returns:
        ``(rows, places, starts)``: the row in each place, int64 ``[T * k]``; the place of each choice, int64 ``[T, k]``;
        and the first place of each expert, with ``T * k`` as the last, int32 ``[num_experts + 1]``.
    """
    flat = ids.flatten()
    experts, order = torch.sort(flat, stable=True)
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(flat), device=ids.device))
    edges = torch.arange(num_experts + 1, dtype=ids.dtype, device=ids.device)
    return order // ids.shape[1], places.view(ids.shape), torch.searchsorted(experts, edges, out_int32=True)


def combine(y: Tensor, places: Tensor, shares: Tensor) -> Tensor:
    """Sum of the outputs of each row's experts, each times its share.

    Args:
        y: Outputs in the order of ``sort_by_expert``, ``[T * k, N]``, floating point. Not modified.
        places: Of ``sort_by_expert``, int64 ``[T, k]``.
        shares: float32 ``[T, k]``.

    Returns:
        ``[T, N]``, dtype of ``y``, newly allocated. Summed in float32 in the order of the choices, so that a row does
        not depend on the others.
    """
    total = torch.zeros(places.shape[0], y.shape[1], dtype=torch.float32, device=y.device)
    for place, share in zip(places.unbind(1), shares.unbind(1), strict=True):
        total.addcmul_(y.index_select(0, place).float(), share.unsqueeze(1))
    return total.to(y.dtype)
