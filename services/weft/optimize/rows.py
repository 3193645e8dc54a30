"""Rows of the user's data, drawn at random, and split into those that calibrate and those that judge."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.base.errors import InvalidArgumentError, WeftError
from weft.jobs.dataset import Dataset, Shard
from weft.optimize.bootstrap import seeded

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
        path: Where they are from.
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

    def shard(self) -> Shard:
        """The rows as a job takes them, numbered from 0."""
        return Shard(0, 0, len(self), self.path, dict(self.columns), self.is_text)


@dataclass(frozen=True)
class SplitData:
    """A data set in two disjoint parts, each in a random order that the seed decides.

    Attributes:
        calibration: Rows for the methods; none of them equals a row that is held out.
        held_out: Rows for the judgement.
        num_rows: Of the whole data set that could be read.
        num_unreadable: Of those that could not.
        sha256: Of its files.
    """

    calibration: DataRows
    held_out: DataRows
    num_rows: int
    num_unreadable: int
    sha256: str


def read_rows(
    path: str, columns: Sequence[str], *, num_calibration: int, num_held_out: int, seed: int, format: str = ""
) -> SplitData:
    """Read a data set and split it.

    Of a large data set rows are drawn without replacement, each with the same probability. Of one that has fewer rows
    than are asked for, a quarter at most calibrates and the rest is held out.

    Args:
        path: File, folder or pattern, as of ``Dataset``.
        columns: Those to read.
        num_calibration: Rows that calibrate, at most.
        num_held_out: Rows that are held out, at most.
        seed: The same one gives the same rows.
        format: Of the files; "": as their suffixes say.

    Raises:
        InvalidArgumentError: There are too few rows, a column is missing, or a file is not what its suffix says.
        NotFoundError: Nothing matches.
        OSError: A file cannot be read.
    """
    try:
        drawn, num_rows, num_unreadable, digest = _draw(path, columns, num_calibration + num_held_out, seed, format)
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
    return SplitData(calibration, held_out, num_rows, num_unreadable, digest)


def _draw(path: str, columns: Sequence[str], num_wanted: int, seed: int, format: str) -> tuple[DataRows, int, int, str]:
    """The rows with the smallest of random keys, in the order of these."""
    dataset = Dataset(path, format)
    random = seeded(seed, "rows")
    kept: dict[str, list[Any]] = {name: [] for name in columns}
    keys = np.empty(0)
    num_rows = num_unreadable = 0
    forms: dict[bool, str] = {}
    for shard in dataset.shards(_ROWS_AT_ONCE, list(columns)):
        forms.setdefault(shard.is_text, shard.file)
        own_keys = random.random(shard.num_rows)
        readable = np.array([row for row in range(shard.num_rows) if row not in shard.faults], np.int64)
        num_rows, num_unreadable = num_rows + len(readable), num_unreadable + len(shard.faults)
        for name in columns:
            kept[name] += _taken(shard.columns[name], readable)
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
    return DataRows(kept, True in forms, path), num_rows, num_unreadable, dataset.files[0].digest if is_one else digest


def _taken(column: Any, rows: Any) -> list[Any]:
    return [column[row] for row in rows] if isinstance(column, list) else list(column.take(rows).to_pylist())


def _keys(rows: DataRows) -> list[str]:
    return [repr(values) for values in zip(*rows.columns.values(), strict=True)]
