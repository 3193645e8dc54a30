"""The value that most members have."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm

from weft.base.tensors import ITEMSIZE_BYTES, WireTensor, encode_bytes, num_elements, split_bytes
from weft.router.combine.method import CLASSES, CombineMethod, CombineSettings, check_alike


def _vote(tensors: Sequence[WireTensor], weights: Sequence[float], settings: CombineSettings) -> WireTensor:
    """For each row the value that most tensors have; weighted: that with the highest sum of weights.

    Ties go to the higher sum of weights, then to the value that is declared first. Without a batch dimension the whole
    tensor is one row.
    """
    first = tensors[0]
    check_alike(tensors)
    if all(tensor.data == first.data for tensor in tensors):
        return first
    num_rows = first.shape[0] if settings.is_batching and first.shape else 1
    ballots = [_rows(tensor, num_rows) for tensor in tensors]
    return WireTensor(
        first.datatype,
        first.shape,
        b"".join(_winner(row, weights, is_weighted=settings.is_weighted) for row in zip(*ballots, strict=True)),
    )


def _ballots(weights: Sequence[float], settings: CombineSettings) -> Sequence[float]:
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


def _winner(row: Sequence[bytes], weights: Sequence[float], *, is_weighted: bool) -> bytes:
    """The winning value of one row; ``max`` keeps the first of equals, which is the one declared first."""
    counts: dict[bytes, int] = {}
    sums: dict[bytes, float] = {}
    for value, weight in zip(row, weights, strict=True):
        counts[value] = counts.get(value, 0) + 1
        sums[value] = sums.get(value, 0) + weight
    if is_weighted:
        return max(sums, key=sums.__getitem__)
    return max(counts, key=lambda value: (counts[value], sums[value]))


VOTE = CombineMethod("VOTE", _vote, CLASSES, _ballots, takes_weights=True)
