"""Scaling of numeric columns: the steps of the ``features`` transform, each a function of a whole matrix."""

from collections.abc import Callable

import numpy as np

from weft.base.errors import InvalidArgumentError
from weft.base.tensors import Array
from weft.serving.backends.arrays import ArrayFile

Step = Callable[[Array], Array]


def _impute(file: ArrayFile, num_columns: int) -> Step:
    statistics = file.numbers("impute.statistics", (num_columns,))
    return lambda values: np.where(np.isnan(values), statistics, values)


def _log1p(file: ArrayFile, num_columns: int) -> Step:
    if "log1p.columns" not in file:
        return np.log1p
    columns = file.numbers("log1p.columns", (-1,))
    if not np.isin(columns, np.arange(num_columns)).all() or len(set(columns.tolist())) != len(columns):
        raise InvalidArgumentError(
            f"{file.path}: 'log1p.columns' must be different whole numbers from 0 to {num_columns - 1}, got "
            f"{columns.tolist()}"
        )
    is_taken = np.isin(np.arange(num_columns), columns)
    return lambda values: np.log1p(values, where=is_taken, out=values.copy())


def _standard(file: ArrayFile, num_columns: int) -> Step:
    return _centred(file, "standard", "mean", num_columns)


def _robust(file: ArrayFile, num_columns: int) -> Step:
    return _centred(file, "robust", "center", num_columns)


def _centred(file: ArrayFile, step: str, center: str, num_columns: int) -> Step:
    """``(x - center) / scale``; both are optional like in scikit-learn, but one of them must be present."""
    absent = [name for name in (center, "scale") if f"{step}.{name}" not in file]
    if len(absent) == 2:
        raise InvalidArgumentError(
            f"{file.path} has neither '{step}.{center}' nor '{step}.scale'; step {step} needs one"
        )
    centers = np.zeros(num_columns) if center in absent else file.numbers(f"{step}.{center}", (num_columns,))
    scales = np.ones(num_columns) if "scale" in absent else file.numbers(f"{step}.scale", (num_columns,))
    if 0 in scales:
        raise InvalidArgumentError(
            f"{file.path}: '{step}.scale' must be other than 0, got 0 in column {int((scales == 0).argmax())}; "
            "write 1 for a column that does not vary, as scikit-learn does"
        )
    return lambda values: (values - centers) / scales


def _min_max(file: ArrayFile, num_columns: int) -> Step:
    factors, offsets = file.numbers("min_max.scale", (num_columns,)), file.numbers("min_max.min", (num_columns,))
    return lambda values: values * factors + offsets


def _clip(file: ArrayFile, num_columns: int) -> Step:
    minimum = file.numbers("clip.min", (num_columns,), may_be_nan=True)
    maximum = file.numbers("clip.max", (num_columns,), may_be_nan=True)
    low, high = np.nan_to_num(minimum, nan=-np.inf), np.nan_to_num(maximum, nan=np.inf)
    if (low > high).any():
        column = int((low > high).argmax())
        raise InvalidArgumentError(
            f"{file.path}: 'clip.min' must be at most 'clip.max', got {low[column]} and {high[column]} in column "
            f"{column}"
        )
    return lambda values: np.clip(values, low, high)


STEPS: dict[str, Callable[[ArrayFile, int], Step]] = {
    "impute": _impute,
    "log1p": _log1p,
    "standard": _standard,
    "robust": _robust,
    "min_max": _min_max,
    "clip": _clip,
}
