"""Encoding of categorical columns for the ``features`` transform."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array

ENCODINGS = ("one_hot", "ordinal")
_NUM_SHOWN = 8


class CategoryEncoder:
    """Encodes the columns of a matrix of categories.

    Args:
        categories: Categories of each column, in the order of their codes.
        encodings: ``one_hot`` or ``ordinal``, for each column.
        is_strict: Whether an unknown category is an error; otherwise it becomes zeros (one_hot) or -1 (ordinal).
        replacements: Category that replaces a missing value (an empty string) in each column; None: no replacement.

    Attributes:
        width: Number of columns of the result.
    """

    def __init__(
        self,
        categories: Sequence[Sequence[Any]],
        encodings: Sequence[str],
        *,
        is_strict: bool,
        replacements: Sequence[Any] | None,
    ) -> None:
        self._categories = categories
        self._is_one_hot = [encoding == "one_hot" for encoding in encodings]
        self._is_strict = is_strict
        self._codes = [{value: code for code, value in enumerate(values)} for values in categories]
        if replacements is not None:
            for codes, replacement in zip(self._codes, replacements, strict=True):
                codes[b""] = codes.get(replacement, -1)
        widths = [len(values) if one_hot else 1 for values, one_hot in zip(categories, self._is_one_hot, strict=True)]
        self.width = sum(widths)
        self._starts = np.cumsum([0, *widths[:-1]])

    def encode(self, values: Array, name: str) -> Array:
        """Encode ``values`` ``[n, K]`` as float64 ``[n, width]``.

        Raises:
            InvalidArgumentError: A category is unknown and the encoder is strict; the message has row and column.
        """
        encoded = np.zeros((len(values), self.width))
        for column, (codes_by_value, start) in enumerate(zip(self._codes, self._starts, strict=True)):
            get = codes_by_value.get
            codes = np.array([get(value, -1) for value in values[:, column].tolist()], np.intp)
            if self._is_strict and (codes < 0).any():
                raise self._unknown(values, column, int((codes < 0).argmax()), name)
            if self._is_one_hot[column]:
                rows = np.flatnonzero(codes >= 0)
                encoded[rows, start + codes[rows]] = 1
            else:
                encoded[:, start] = codes
        return encoded

    def _unknown(self, values: Array, column: int, row: int, name: str) -> InvalidArgumentError:
        known = self._categories[column]
        shown = ", ".join(map(_shown, known[:_NUM_SHOWN])) + (f" and {len(known) - _NUM_SHOWN} more") * (
            len(known) > _NUM_SHOWN
        )
        return InvalidArgumentError(
            f"input '{name}' row {row} column {column}: unknown category {_shown(values[row, column])}; it must be one "
            f"of {shown}"
        )


def _shown(value: Any) -> str:
    return repr(value.decode(errors="replace")[:80]) if isinstance(value, bytes) else str(value)
