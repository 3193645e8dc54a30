"""Split-conformal calibration."""

import math
from pathlib import Path

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array


def calibrated_width(scores: Array, coverage: float, path: Path) -> Array:
    """The score at rank ``ceil((m + 1) * coverage)`` in ascending order, for each column.

    A new score that is exchangeable with the m scores of a column is at most this one with a probability of at least
    ``coverage``, and below ``coverage + 1 / (m + 1)`` if there are no ties.

    Args:
        scores: float64 ``[m, D]``, larger for larger errors of the model.
        coverage: Between 0 and 1.
        path: Source file, for errors.

    Returns:
        float64 ``[D]``.

    Raises:
        InvalidArgumentError: m is too small for this coverage: the rank exceeds m.
    """
    num_rows = len(scores)
    rank = math.ceil(round((num_rows + 1) * coverage, 9))
    if rank > num_rows:
        needed = math.ceil(round(coverage / (1 - coverage), 9))
        raise InvalidArgumentError(
            f"{path} has {num_rows} rows; a coverage of {coverage} needs at least {needed} to calibrate with"
        )
    width: Array = np.partition(scores, rank - 1, axis=0)[rank - 1]
    return width
