"""Draws and splits rows of the user's data for calibration and judgement, and collects a graph's answers to them."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft.base.errors import InvalidArgumentError, WeftError
from weft.jobs.dataset import Dataset, Shard
from weft.jobs.layout import ROW, Layout
from weft.jobs.output import FailedRow
from weft.jobs.shard import SendRequest, first_error, run_shard
from weft.optimize.gate import seeded

#: Rows that are read at once.
_ROWS_AT_ONCE = 4096
_MIN_ROWS = 8
#: Of few rows this share, at most, calibrates.
_CALIBRATION_SHARE = 0.25


@dataclass(frozen=True)
class DataRows:
    """Some rows of a data set.

    Attributes:
        columns: Values by column, as Python has them; all of one length.
        is_text: Every value is text, as in CSV.
    """

    columns: Mapping[str, Sequence[Any]]
    is_text: bool
    path: str

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, indices: Sequence[int]) -> "DataRows":
        """The rows of these indices, in their order."""
        columns = {name: [values[index] for index in indices] for name, values in self.columns.items()}
        return DataRows(columns, self.is_text, self.path)


@dataclass(frozen=True)
class SplitData:
    """A data set in two disjoint parts, each in a random order given by the seed.

    Attributes:
        calibration: Rows for the methods; none equals a held-out row.
        held_out: Rows for the judgement.
    """

    calibration: DataRows
    held_out: DataRows
    sha256: str


def read_rows(
    path: str, columns: Sequence[str], *, num_calibration: int, num_held_out: int, seed: int, format: str = ""
) -> SplitData:
    """Read a data set and split it.

    Of a large data set, rows are drawn uniformly without replacement. If it has fewer rows than asked for, at most a
    quarter calibrates and the rest is held out.

    Args:
        num_calibration: Most rows for calibration.
        num_held_out: Most rows held out.
        format: Of the files; "": by suffix.

    Raises:
        InvalidArgumentError: There are too few rows, a column is missing, or a file contradicts its suffix.
        NotFoundError: Nothing matches.
        OSError: A file cannot be read.
    """
    try:
        drawn, num_rows, digest = _draw(path, columns, num_calibration + num_held_out, seed, format)
    except WeftError as error:  # which names the option of weft batch
        raise error.with_message(error.message.replace("--input", "--data")) from None
    if num_rows < _MIN_ROWS:
        raise InvalidArgumentError(
            f"--data '{path}' has {num_rows} rows that can be read, and at least {_MIN_ROWS} are needed to calibrate "
            "and to judge; a few hundred are a good number"
        )
    for name in columns:
        if all(value is None for value in drawn.columns[name]):
            raise InvalidArgumentError(
                f"--data '{path}': column '{name}' is missing or empty in every row; --column INPUT=COLUMN, "
                "--label and --positive name others"
            )
    is_short = len(drawn) < num_calibration + num_held_out
    least_held_out = len(drawn) - min(num_calibration, int(len(drawn) * _CALIBRATION_SHARE) if is_short else len(drawn))
    held_out = drawn.take(range(min(num_held_out, least_held_out)))
    judged = set(_keys(held_out))
    rest = drawn.take(range(len(held_out), min(len(drawn), len(held_out) + num_calibration)))
    calibration = rest.take([index for index, key in enumerate(_keys(rest)) if key not in judged])
    if not len(calibration):
        raise InvalidArgumentError(
            f"--data '{path}': every row that could calibrate equals one that is held out; give more different rows"
        )
    return SplitData(calibration, held_out, digest)


def _draw(path: str, columns: Sequence[str], num_wanted: int, seed: int, format: str) -> tuple[DataRows, int, str]:
    """The rows with the smallest random keys, in key order; the number of all readable rows; the digest."""
    dataset = Dataset(path, format)
    random = seeded(seed, "rows")
    kept: dict[str, list[Any]] = {name: [] for name in columns}
    keys = np.empty(0)
    num_rows = 0
    forms: dict[bool, str] = {}
    for shard in dataset.shards(_ROWS_AT_ONCE, list(columns)):
        forms.setdefault(shard.is_text, shard.file)
        own_keys = random.random(shard.num_rows)
        readable = np.array([row for row in range(shard.num_rows) if row not in shard.faults], np.int64)
        num_rows += len(readable)
        for name in columns:
            column = shard.columns[name]
            taken = [column[row] for row in readable] if isinstance(column, list) else column.take(readable).to_pylist()
            kept[name] += taken
        keys = np.concatenate([keys, own_keys[readable]])
        smallest = np.argsort(keys, kind="stable")[:num_wanted]
        keys = keys[smallest]
        kept = {name: [values[index] for index in smallest] for name, values in kept.items()}
    if len(forms) > 1:
        raise InvalidArgumentError(
            f"--data '{path}' has CSV files and others ('{forms[True]}', '{forms[False]}'); give files of one kind"
        )
    digest = hashlib.sha256("\n".join(file.digest for file in dataset.files).encode()).hexdigest()
    is_one = len(dataset.files) == 1 and len(dataset.files[0].digest) == len(digest)
    return DataRows(kept, True in forms, path), num_rows, dataset.files[0].digest if is_one else digest


def _keys(rows: DataRows) -> list[str]:
    return [repr(values) for values in zip(*rows.columns.values(), strict=True)]


class RowAnswers(NamedTuple):
    """Answers of a graph.

    Attributes:
        rows: Indices of the answered rows, ascending.
        outputs: By name, one entry for each of these rows: an array ``[num_rows, ...]``, or a list of arrays if their
            shapes differ. BYTES are ``bytes`` objects; None if an optional output is missing.
        failed: The other rows.
    """

    rows: NDArray[np.int64]
    outputs: Mapping[str, Any]
    failed: Sequence[FailedRow]

    def only(self, rows: NDArray[np.int64]) -> "RowAnswers":
        """The answers to these rows, all of which are answered."""
        places = np.searchsorted(self.rows, rows)
        outputs = {
            name: values[places] if isinstance(values, np.ndarray) else [values[place] for place in places]
            for name, values in self.outputs.items()
        }
        return RowAnswers(rows, outputs, ())


async def answer_rows(rows: DataRows, layout: Layout, send: SendRequest) -> RowAnswers:
    """Send every row, in requests according to the layout, and collect the answers.

    A failing request is split in halves until the rows at fault are found.

    Raises:
        WeftError: ``send`` raised anything but ``RowsFailed``.
    """
    shard = Shard(0, 0, len(rows), rows.path, dict(rows.columns), rows.is_text)
    try:
        result = await run_shard(shard, layout, send)
    except* WeftError as group:
        raise first_error(group) from None
    numbers = np.array(result.columns[ROW].to_pylist(), np.int64)
    outputs = {
        spec.name: _array(result.columns[spec.name].to_pylist(), np.object_ if spec.datatype == "BYTES" else None)
        for spec in layout.outputs
    }
    return RowAnswers(numbers, outputs, result.failed)


def _array(column: Sequence[Any], dtype: Any) -> Any:
    values = [None if value is None else np.array(value, dtype) for value in column]
    if values and all(value is not None and value.shape == values[0].shape for value in values):  # type: ignore[union-attr]
        return np.stack(values)  # type: ignore[arg-type]
    return values


def answered_rows(answers: Sequence[RowAnswers]) -> NDArray[np.int64]:
    """Rows that have an answer in every pass, ascending."""
    rows = answers[0].rows
    for one in answers[1:]:
        rows = np.intersect1d(rows, one.rows)
    return rows


def num_not_finite(original: Sequence[RowAnswers], candidate: Sequence[RowAnswers]) -> int:
    """Number of rows with non-finite numbers in the candidate's answers but not in the original's.

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
