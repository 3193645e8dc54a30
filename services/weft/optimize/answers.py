"""Answers of a graph to rows, as arrays."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import WeftError
from weft.jobs.layout import ROW, Layout
from weft.jobs.output import FailedRow
from weft.jobs.shard import SendRows, run_shard
from weft.optimize.rows import DataRows


class RowAnswers(NamedTuple):
    """What a graph answered.

    Attributes:
        rows: Indices of the rows that have an answer, ascending.
        outputs: By name, one entry for each of these rows: an array ``[num_rows, ...]``, or a list of arrays where
            their shapes differ. BYTES are ``bytes`` objects; None where an optional output is missing.
        failed: The other rows.
    """

    rows: NDArray[np.int64]
    outputs: Mapping[str, Any]
    failed: Sequence[FailedRow]

    def only(self, rows: NDArray[np.int64]) -> "RowAnswers":
        """Those to these rows, all of which have one."""
        places = np.searchsorted(self.rows, rows)
        outputs = {
            name: values[places] if isinstance(values, np.ndarray) else [values[place] for place in places]
            for name, values in self.outputs.items()
        }
        return RowAnswers(rows, outputs, ())


async def answer_rows(rows: DataRows, layout: Layout, send: SendRows) -> RowAnswers:
    """Send every row, in requests as the layout says, and take the answers.

    A request that fails is tried by halves until the rows at fault are found.

    Raises:
        WeftError: ``send`` raised anything but ``RowsFailed``.
    """
    try:
        result = await run_shard(rows.shard(), layout, send)
    except* WeftError as group:
        raise _first(group) from None
    numbers = np.array(result.columns[ROW].to_pylist(), np.int64)
    outputs = {
        spec.name: _array(result.columns[spec.name].to_pylist(), np.object_ if spec.datatype == "BYTES" else None)
        for spec in layout.outputs
    }
    return RowAnswers(numbers, outputs, result.failed)


def answered_rows(answers: Sequence[RowAnswers]) -> NDArray[np.int64]:
    """Rows that have an answer in every pass, ascending."""
    rows = answers[0].rows
    for one in answers[1:]:
        rows = np.intersect1d(rows, one.rows)
    return rows


def num_not_finite(original: Sequence[RowAnswers], candidate: Sequence[RowAnswers]) -> int:
    """How many rows have a number that is not finite in the candidate's answers, and none in the original's.

    Both are answers of each pass, to the same rows.
    """
    broken = np.zeros(len(original[0].rows), np.bool_)
    for before, after in zip(original, candidate, strict=True):
        for name, values in after.outputs.items():
            broken |= ~_is_finite(values) & _is_finite(before.outputs[name])
    return int(broken.sum())


def _is_finite(values: Any) -> NDArray[np.bool_]:
    return np.array(
        [value is None or value.dtype.kind != "f" or bool(np.isfinite(value).all()) for value in values], np.bool_
    )


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _array(column: Sequence[Any], dtype: Any) -> Any:
    values = [None if value is None else np.array(value, dtype) for value in column]
    if values and all(value is not None and value.shape == values[0].shape for value in values):  # type: ignore[union-attr]
        return np.stack(values)  # type: ignore[arg-type]
    return values
