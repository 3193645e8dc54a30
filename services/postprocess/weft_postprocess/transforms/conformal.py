"""Split-conformal calibration."""

import math
from pathlib import Path

import numpy as np

from weft_common.errors import InvalidArgumentError
from weft_common.tensors import Array


def calibrated_width(scores: Array, coverage: float, path: Path) -> Array:
    """The score at place ``ceil((m + 1) * coverage)`` in ascending order, of each column.

    A new score that is exchangeable with the m of a column is at most this one with a probability of at least
    ``coverage``, and below ``coverage + 1 / (m + 1)`` if there are no ties.

    Args:
        scores: float64 ``[m, D]``, larger where the model was more wrong.
        coverage: Between 0 and 1.
        path: Where they come from, for the error.

    Returns:
        float64 ``[D]``.

    Raises:
        InvalidArgumentError: m is too small for this coverage: the place would be after the last one.
    """
    num_rows = len(scores)
    place = math.ceil(round((num_rows + 1) * coverage, 9))
    if place > num_rows:
        needed = math.ceil(round(coverage / (1 - coverage), 9))
        raise InvalidArgumentError(
            f"{path} has {num_rows} rows; a coverage of {coverage} needs at least {needed} to calibrate with"
        )
    width: Array = np.partition(scores, place - 1, axis=0)[place - 1]
    return width
