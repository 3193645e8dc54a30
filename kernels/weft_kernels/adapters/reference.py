"""Low-rank adapters, added to the products of rows that have one, in torch; see ``add_lora``."""

from collections.abc import Sequence

from torch import Tensor

from weft_kernels.linear.reference import linear

#: Parts of the outputs that kernels know, at most: queries, keys and values.
MAX_PARTS = 3


def add_lora(out: Tensor, x: Tensor, a: Tensor, b: Tensor, ends: Sequence[int], slots: Tensor) -> None:
    """Add ``x[t] @ a[s] @ b[s]`` to row ``t`` of ``out``, where ``s`` is the row's slot; part by part of the outputs.

    A row's result is bitwise independent of the other rows.

    Args:
        out: Products with the base weight, shape ``[T, N]``, contiguous; changed in place.
        x: Rows, shape ``[T, K]``, dtype and device as all but ``slots``. Not modified.
        a: Down projections of all slots, shape ``[S, K, P * R]``, contiguous: a block of ``R`` columns for each of the
            ``P`` parts.
        b: Up projections with their scales, shape ``[S, R, N]``, contiguous: the columns of a part have that part's.
        ends: End of each part's columns, ascending; the last is ``N``.
        slots: Slot of each row, int32 ``[T]``; -1: the row stays as it is.
    """
    rank = b.shape[1]
    for slot in slots.unique().tolist():
        if slot < 0:
            continue
        rows = (slots == slot).nonzero().squeeze(1)
        hidden = linear(x[rows], a[slot].t(), deterministic=True)
        first = 0
        for part, end in enumerate(ends):
            own = hidden[:, part * rank : (part + 1) * rank]
            out[rows, first:end] += linear(own, b[slot, :, first:end].t(), deterministic=True)
            first = end
