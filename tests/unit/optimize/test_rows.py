"""The user's data, drawn and split."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.optimize.rows import SplitData, read_rows


def split(path: Path | str, calibration: int = 30, held_out: int = 60, seed: int = 0, column: str = "x") -> SplitData:
    """With the column ``x``."""
    return read_rows(str(path), [column], num_calibration=calibration, num_held_out=held_out, seed=seed)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    """The numbers from 0 to 9,999, in files that hold more rows than are read at once."""
    for part in range(2):
        rows = range(part * 5000, part * 5000 + 5000)
        pq.write_table(pa.table({"x": rows}), tmp_path / f"{part}.parquet")
    return tmp_path


def test_parts_are_disjoint_and_as_large_as_asked_for(numbers: Path) -> None:
    """Drawn from all files, without replacement."""
    data = split(numbers)
    calibration, held_out = (list(rows.columns["x"]) for rows in (data.calibration, data.held_out))
    assert (30, 60) == (len(calibration), len(held_out))
    assert 90 == len({*calibration, *held_out})
    assert min(held_out) < 5000 <= max(held_out)


def test_the_seed_decides(numbers: Path) -> None:
    """And nothing else."""
    assert split(numbers, seed=4) == split(numbers, seed=4)
    assert split(numbers, seed=4).held_out != split(numbers, seed=5).held_out


def test_every_row_is_as_likely(numbers: Path) -> None:
    """Over seeds, rows of either file, and of the first and later pieces of it, are drawn alike."""
    drawn = [x for seed in range(20) for x in split(numbers, 100, 400, seed).held_out.columns["x"]]
    counts = [sum(low <= x < low + 2500 for x in drawn) for low in range(0, 10_000, 2500)]
    assert all(1800 <= count <= 2200 for count in counts)


@pytest.mark.parametrize(("num_rows", "expected"), [(8, (2, 6)), (40, (10, 30)), (90, (30, 60)), (1000, (30, 60))])
def test_a_quarter_of_few_rows_calibrates(tmp_path: Path, num_rows: int, expected: tuple[int, int]) -> None:
    """The rest judges, up to what is asked for."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(f'{{"x": {row}}}\n' for row in range(num_rows)))
    data = split(path)
    assert expected == (len(data.calibration), len(data.held_out))


def test_parts_of_enough_rows_have_any_proportion(numbers: Path) -> None:
    """A large one that judges beside a small one that calibrates, and the other way round."""
    for calibration, held_out in ((2, 300), (300, 2)):
        data = split(numbers, calibration, held_out)
        assert (calibration, held_out) == (len(data.calibration), len(data.held_out))


def test_a_row_that_equals_one_that_is_held_out_does_not_calibrate(tmp_path: Path) -> None:
    """Or the method would have seen it."""
    path = tmp_path / "twice.jsonl"
    path.write_text("".join(f'{{"x": {row % 12}}}\n' for row in range(24)))
    data = split(path, 12, 12)
    assert not {*data.calibration.columns["x"]} & {*data.held_out.columns["x"]}
    path.write_text('{"x": 1}\n' * 24)
    with pytest.raises(InvalidArgumentError, match="equals one that is held out"):
        split(path)


def test_rows_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    """The others are all there."""
    path = tmp_path / "some.jsonl"
    path.write_text("".join(["no json\n", '{"x": 1}\n', "[]\n", *(f'{{"x": {row}}}\n' for row in range(2, 20))]))
    data = split(path)
    assert 19 == len(data.calibration) + len(data.held_out)


def test_csv_is_text_and_compressed_json_is_read(tmp_path: Path) -> None:
    """Text of numbers becomes numbers when the tensors are made."""
    with (tmp_path / "a.csv").open("w", newline="") as stream:
        csv.writer(stream).writerows([["x"], *([row] for row in range(20))])
    data = split(tmp_path / "a.csv")
    assert data.held_out.is_text
    assert set(data.held_out.columns["x"]) <= {str(row) for row in range(20)}
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as lines:
        lines.writelines(json.dumps({"x": row}) + "\n" for row in range(20))
    assert not split(tmp_path / "b.jsonl.gz").held_out.is_text
    (tmp_path / "c.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(InvalidArgumentError, match="CSV files and others"):
        split(tmp_path)


@pytest.mark.parametrize(
    ("content", "column", "told"),
    [
        ("", "x", "has 0 rows that can be read, and at least 8 are needed"),
        ('{"x": 1}\n' * 3, "x", "has 3 rows"),
        ('{"x": 1}\n' * 20, "y", "column 'y' is missing or empty in every row; --column"),
    ],
)
def test_bad_data_is_told(tmp_path: Path, content: str, column: str, told: str) -> None:
    """With what is wrong and the cure."""
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=told):
        split(path, column=column)


def test_a_missing_file_is_told_by_the_name_of_this_option(tmp_path: Path) -> None:
    """Not by that of weft batch."""
    with pytest.raises(NotFoundError, match=r"--data '.*' matches no file"):
        split(tmp_path / "none.jsonl")
