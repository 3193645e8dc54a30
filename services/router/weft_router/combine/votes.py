"""The value that most members have."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from weft_common.tensors import ITEMSIZE_BYTES, WireTensor, encode_bytes, num_elements, split_bytes
from weft_router.combine.alike import check_alike


def vote(tensors: Sequence[WireTensor], weights: Sequence[int], *, is_weighted: bool, is_batching: bool) -> WireTensor:
    """For each row the value that most tensors have.

    Args:
        tensors: One per voter, in declared order; same datatype (integer, BOOL or BYTES) and shape.
        weights: One per voter, whole numbers (``ballot_weights``), so that equal sums are equal.
        is_weighted: The highest sum of weights wins instead of the most votes.
        is_batching: The leading axis counts rows; else the whole tensor is one row.

    Returns:
        The voted rows; ties go to the higher sum of weights, then to the value that is declared first.

    Raises:
        InternalError: Datatypes or shapes differ.
    """
    first = tensors[0]
    check_alike(tensors)
    if all(tensor.data == first.data for tensor in tensors):
        return first
    num_rows = first.shape[0] if is_batching and first.shape else 1
    ballots = [_rows(tensor, num_rows) for tensor in tensors]
    return WireTensor(
        first.datatype,
        first.shape,
        b"".join(_winner(row, weights, is_weighted=is_weighted) for row in zip(*ballots, strict=True)),
    )


def ballot_weights(weights: Sequence[float]) -> list[int]:
    """Whole numbers in the proportion of ``weights`` as they are written: 0.1 and 0.2 together tie with 0.3."""
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    return [int(weight * scale) for weight in exact]


def _rows(tensor: WireTensor, num_rows: int) -> list[bytes]:
    """The wire bytes of each row."""
    if num_rows == 0:
        return []
    per_row = num_elements(tensor.shape) // num_rows
    if tensor.datatype == "BYTES":
        elements = split_bytes(tensor.data)
        return [encode_bytes(elements[row * per_row : (row + 1) * per_row]) for row in range(num_rows)]
    size = per_row * ITEMSIZE_BYTES[tensor.datatype]
    return [tensor.data[row * size : (row + 1) * size] for row in range(num_rows)]


def _winner(row: Sequence[bytes], weights: Sequence[int], *, is_weighted: bool) -> bytes:
    """The winning value of one row; ``max`` keeps the first of equals, which is the one declared first."""
    counts: dict[bytes, int] = {}
    sums: dict[bytes, int] = {}
    for value, weight in zip(row, weights, strict=True):
        counts[value] = counts.get(value, 0) + 1
        sums[value] = sums.get(value, 0) + weight
    if is_weighted:
        return max(sums, key=sums.__getitem__)
    return max(counts, key=lambda value: (counts[value], sums[value]))
