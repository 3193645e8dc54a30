"""Link functions: network outputs to positive parameters."""

from collections.abc import Callable, Mapping

import numpy as np

from weft.base.tensors import Array
from weft.serving.backends.rows import check_finite, check_rows, first_bad

LINKS: Mapping[str, Callable[[Array], Array]] = {
    "identity": lambda values: values,
    "exp": np.exp,
    "softplus": lambda values: np.logaddexp(values, 0),
}


def positive(array: Array, name: str, link: str) -> Array:
    """Apply ``link`` to ``array``; shape ``[num_rows, ...]``, results finite and at least 0.

    Raises:
        InvalidArgumentError: A result is not; the message has input, row and value.
    """
    check_finite(array, name)
    with np.errstate(over="ignore"):
        values = LINKS[link](array)
    is_good = (values >= 0) & np.isfinite(values)
    if not is_good.all():
        after = "" if link == "identity" else f" after {link}"
        check_rows(
            is_good, name, lambda row: f"{first_bad(values[row], is_good[row])}{after}; it must be finite, at least 0"
        )
    return values
