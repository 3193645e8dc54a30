"""``features``: numeric and categorical columns to one scaled feature vector."""

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.backends.contract import only_output
from weft.base.errors import InvalidArgumentError
from weft.base.signature import TensorSpec
from weft.base.tensors import NUMPY_BY_DATATYPE, Array
from weft.serving.backends.base import RowBackend, check_rows, first_bad
from weft.serving.backends.loading import ArrayFile, array_file, check_tensor
from weft.serving.backends.parameters import ParameterReader

Step = Callable[[Array], Array]
ENCODINGS = ("one_hot", "ordinal")
_NUM_SHOWN = 8
_NUMBERS, _CATEGORIES = "NUMBERS", "CATEGORIES"
_FLOATS = ("FP32", "FP64")
_INTEGERS = ("INT64", "INT32")


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
    "standard": lambda file, num_columns: _centred(file, "standard", "mean", num_columns),
    "robust": lambda file, num_columns: _centred(file, "robust", "center", num_columns),
    "min_max": _min_max,
    "clip": _clip,
}


def _shown(value: Any) -> str:
    return repr(value.decode(errors="replace")[:80]) if isinstance(value, bytes) else str(value)


class FeaturesBackend(RowBackend):
    """Scales the numbers and encodes the categories of each row into one vector.

    ::

        NUMBERS    FP32, FP64, INT64 or INT32 [n, D]    ->  FEATURES FP32 or FP64 [n, F]
        CATEGORIES BYTES, INT64 or INT32      [n, K]

    One of the two inputs may be undeclared; the output may have any name. ``F`` is D, plus for each category column 1
    (ordinal) or its number of categories (one_hot). The steps are applied in the given order, in float64:

    ==========  =========================================  =========================================================
    step        a number x of column d becomes             file
    ==========  =========================================  =========================================================
    impute      statistics[d] where x is NaN               impute.statistics [D]
    log1p       ln(1 + x)                                  log1p.columns: some of 0 to D - 1; without it all
    standard    (x - mean[d]) / scale[d]                   standard.mean [D], standard.scale [D]; one may be absent
    robust      (x - center[d]) / scale[d]                 robust.center [D], robust.scale [D]; one may be absent
    min_max     scale[d] * x + min[d]                      min_max.scale [D], min_max.min [D]
    clip        min(max(x, min[d]), max[d])                clip.min [D], clip.max [D]; null or NaN is no bound
    ==========  =========================================  =========================================================

    The version folder holds ``features.json`` or ``features.npz`` (or ``default_model_filename``). Names are those
    of scikit-learn's attributes without the trailing underscore; ``categories.0`` to ``categories.{K-1}`` are the
    categories of each column in the order of their codes; ``categories.missing``, if present, is the category that
    replaces an empty string in each column.

    Parameters (all optional):
        steps: Steps to apply, in order, comma-separated. Default: none.
        encoding: ``one_hot`` or ``ordinal``, one for all category columns or one for each, comma-separated. Default
            one_hot.
        unknown: Treatment of unknown categories: ``error``, or ``ignore``: all zeros (one_hot), -1 (ordinal).
            Default error.
        missing: Treatment of NaN after the last step: ``error``, or ``keep`` for models that accept NaN. Default error.

    Infinite numbers, NaN if ``missing`` is error, and unknown categories are INVALID_ARGUMENT for their own
    request alone.

    Source:
        ``SimpleImputer``, ``StandardScaler``, ``RobustScaler``, ``MinMaxScaler``, ``OneHotEncoder`` and
        ``OrdinalEncoder`` of https://scikit-learn.org, the oracles of the tests.
    """

    def load(self) -> None:
        """Read the parameters and the file, and validate them against the declared tensors."""
        numbers, categories = self._declared_inputs()
        parameters = ParameterReader(self.model)
        file = array_file(self.model, "features")
        names = parameters.choices("steps", "", tuple(STEPS)) if parameters.text("steps", "") else ()
        if names and numbers is None:
            raise parameters.fault("steps", ",".join(names), f"left out where there is no input '{_NUMBERS}'")
        self._num_numbers = 0 if numbers is None else numbers.dims[0]
        self._steps: list[Step] = [STEPS[name](file, self._num_numbers) for name in names]
        self._keeps_missing = parameters.choice("missing", "error", ("error", "keep")) == "keep"
        num_encoded = self._read_categories(parameters, file, categories)
        parameters.finish()
        file.finish()
        width = self._num_numbers + num_encoded
        output = only_output(self.model, _FLOATS, (width,))
        self._output, self._dtype = output.name, NUMPY_BY_DATATYPE[output.datatype]

    def run(self, inputs: dict[str, Array], num_rows: int) -> dict[str, Array]:
        """Scale the numbers, encode the categories."""
        parts: list[Array] = []
        if self._num_numbers:
            parts.append(self._scaled(inputs[_NUMBERS].astype(np.float64)))
        if self._codes:
            parts.append(self._encoded(inputs[_CATEGORIES]))
        return {self._output: np.concatenate(parts, axis=1, dtype=self._dtype)}

    def _scaled(self, values: Array) -> Array:
        is_number = ~np.isinf(values)
        if not is_number.all():
            check_rows(is_number, _NUMBERS, lambda row: f"{first_bad(values[row], is_number[row])} must be finite")
        scaled = values
        with np.errstate(invalid="ignore", divide="ignore"):  # an invalid logarithm is reported below
            for step in self._steps:
                scaled = step(scaled)
        is_good = np.isfinite(scaled) | (np.isnan(values) if self._keeps_missing else False)
        if not is_good.all():
            cure = "" if self._keeps_missing else "; a missing number needs the step impute, or missing: keep"
            check_rows(
                is_good,
                _NUMBERS,
                lambda row: f"{first_bad(values[row], is_good[row])} has no finite result{cure}",
            )
        return scaled

    def _declared_inputs(self) -> tuple[TensorSpec | None, TensorSpec | None]:
        """NUMBERS and CATEGORIES, if declared; their number of columns is fixed."""
        inputs = {spec.name: spec for spec in self.model.signature.inputs}
        if not inputs or not set(inputs) <= {_NUMBERS, _CATEGORIES}:
            raise self.model.fault(
                "input",
                f"model '{self.model.signature.name}' must have the inputs '{_NUMBERS}', '{_CATEGORIES}', or both, got "
                f"{', '.join(inputs)}",
            )
        for name, spec in inputs.items():
            datatypes = (*_FLOATS, *_INTEGERS) if name == _NUMBERS else ("BYTES", *_INTEGERS)
            check_tensor(self.model, spec, datatypes, (None,))
            if spec.dims[0] < 1:
                path = f"input[{self.model.signature.inputs.index(spec)}].dims"
                raise self.model.error(path, f"'{name}' must have a fixed number of columns, got -1")
        return inputs.get(_NUMBERS), inputs.get(_CATEGORIES)

    def _read_categories(self, parameters: ParameterReader, file: ArrayFile, spec: TensorSpec | None) -> int:
        """How many columns the categories become."""
        text = parameters.text("encoding", "one_hot")
        self._is_strict = parameters.choice("unknown", "error", ("error", "ignore")) == "error"
        self._codes: list[dict[Any, int]] = []
        if spec is None:
            return 0
        num_columns, is_text = spec.dims[0], spec.datatype == "BYTES"
        encodings = [encoding.strip() for encoding in text.split(",")]
        if len(encodings) not in (1, num_columns) or not set(encodings) <= set(ENCODINGS):
            raise parameters.fault("encoding", text, f"1 or {num_columns} of {', '.join(ENCODINGS)}")
        encodings = encodings if len(encodings) == num_columns else encodings * num_columns
        self._is_one_hot = [encoding == "one_hot" for encoding in encodings]
        self._categories = [_categories(file, f"categories.{column}", is_text) for column in range(num_columns)]
        self._codes = [{value: code for code, value in enumerate(values)} for values in self._categories]
        if is_text and "categories.missing" in file:
            replacements = file.strings("categories.missing")
            if len(replacements) != num_columns:
                raise InvalidArgumentError(
                    f"{file.path}: 'categories.missing' must have {num_columns} strings, one per column, got "
                    f"{len(replacements)}"
                )
            for codes, replacement in zip(self._codes, replacements, strict=True):
                codes[b""] = codes.get(replacement.encode(), -1)
        pairs = zip(self._categories, self._is_one_hot, strict=True)
        widths = [len(values) if is_one_hot else 1 for values, is_one_hot in pairs]
        self._starts = np.cumsum([0, *widths])
        return sum(widths)

    def _encoded(self, values: Array) -> Array:
        """From ``[n, K]`` to float64 ``[n, width]``."""
        encoded = np.zeros((len(values), self._starts[-1]))
        for column, codes_by_value in enumerate(self._codes):
            get, start = codes_by_value.get, self._starts[column]
            codes = np.array([get(value, -1) for value in values[:, column].tolist()], np.intp)
            if self._is_strict and (codes < 0).any():
                row, known = int((codes < 0).argmax()), self._categories[column]
                more = f" and {len(known) - _NUM_SHOWN} more" if len(known) > _NUM_SHOWN else ""
                raise InvalidArgumentError(
                    f"input '{_CATEGORIES}' row {row} column {column}: unknown category {_shown(values[row, column])}; "
                    f"it must be one of {', '.join(map(_shown, known[:_NUM_SHOWN]))}{more}"
                )
            if self._is_one_hot[column]:
                rows = np.flatnonzero(codes >= 0)
                encoded[rows, start + codes[rows]] = 1
            else:
                encoded[:, start] = codes
        return encoded


def _categories(file: ArrayFile, name: str, is_text: bool) -> list[Any]:
    values: list[Any]
    if is_text:
        values = [text.encode() for text in file.strings(name)]
    else:
        numbers = file.numbers(name, (-1,))
        values = numbers.astype(np.int64).tolist()
        if values != numbers.tolist():
            raise InvalidArgumentError(f"{file.path}: '{name}' must be whole numbers, got {numbers.tolist()[:8]}")
    if len(set(values)) != len(values):
        raise InvalidArgumentError(f"{file.path}: '{name}' has a category twice; categories of a column must differ")
    return values
