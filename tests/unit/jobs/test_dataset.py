"""Files of a data set as shards of rows."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.jobs.dataset import Dataset, Shard


def test_shards_follow_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    """A shard never spans two files; rows are counted over all of them; hidden files are no data."""
    pq.write_table(pa.table({"x": range(5)}), tmp_path / "b.parquet", row_group_size=2)
    (tmp_path / "a.jsonl").write_text('{"x": 10}\n\n{"x": 11}\n')
    (tmp_path / "_SUCCESS.jsonl").write_text("no")
    dataset = Dataset(str(tmp_path))
    shards = list(dataset.shards(3, ["x"]))
    assert [(shard.index, shard.first_row, shard.num_rows) for shard in shards] == [(0, 0, 2), (1, 2, 3), (2, 5, 2)]
    assert shards[0].columns["x"] == [10, 11]
    assert [value.as_py() for shard in shards[1:] for value in shard.columns["x"]] == [0, 1, 2, 3, 4]


def test_compressed_files_and_patterns(tmp_path: Path) -> None:
    """A pattern names files; .gz is unpacked as it is read."""
    for name in ("a", "b"):
        with gzip.open(tmp_path / f"{name}.csv.gz", "wt") as stream:
            stream.write(f'id,text\n1,"{name}, quoted"\n')
    (shard_a, shard_b) = Dataset(str(tmp_path / "*.csv.gz")).shards(8, ["text"])
    assert (shard_a.columns, shard_b.columns) == ({"text": ["a, quoted"]}, {"text": ["b, quoted"]})
    assert shard_a.is_text


def test_lines_and_records_that_cannot_be_read_are_faults_of_their_rows(tmp_path: Path) -> None:
    """Broken JSON, a line that is no object, and a record with too few cells each fail one row."""
    (tmp_path / "a.jsonl").write_bytes(b'{"x": 1}\n{"x": \n[1]\n{"y": 1}\n{"x": "\xff"}\n')
    (shard,) = Dataset(str(tmp_path / "a.jsonl")).shards(8, ["x"])
    assert sorted(shard.faults) == [1, 2]
    assert shard.columns["x"][:4] == [1, None, None, None]
    (tmp_path / "b.csv").write_text("x,y\n1,2\n3\n4,5\n")
    (shard,) = Dataset(str(tmp_path / "b.csv")).shards(8, ["y"])
    assert shard.faults == {1: "has 1 cells, the header 2: '3'"}
    assert shard.columns["y"] == ["2", None, "5"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.parquet", b"no parquet", "is no Parquet file that can be read"),
        ("a.parquet", b"", "is no Parquet file that can be read"),
        ("a.csv", b"", "has no column 'x'; it has none"),
        ("a.csv", b"X,y\n1,2\n", "has no column 'x'; did you mean 'X'?"),
    ],
)
def test_files_that_do_not_fit_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    """A file that is not what its name says, or lacks a column, ends the job with its name."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError) as caught:
        list(Dataset(str(tmp_path / name)).shards(8, ["x"]))
    assert message in caught.value.message


def test_what_is_not_there_and_unknown_names(tmp_path: Path) -> None:
    """No file, an unknown suffix and an unknown protocol are refused before anything is read."""
    with pytest.raises(NotFoundError, match="matches no file"):
        Dataset(str(tmp_path / "*.csv"))
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(InvalidArgumentError, match="--format says what it is"):
        Dataset(str(tmp_path / "a.txt"))
    assert Dataset(str(tmp_path / "a.txt"), "jsonl").files[0].format == "jsonl"
    with pytest.raises(InvalidArgumentError, match="nosuch"):
        Dataset("nosuch://a.csv")


def test_the_digest_follows_the_content(tmp_path: Path) -> None:
    """A file that changes has another digest, whatever its name and size."""
    path = tmp_path / "a.csv"
    path.write_text("x\n1\n")
    before = Dataset(str(path)).files
    path.write_text("x\n2\n")
    assert Dataset(str(path)).files != before


def test_each_shard_can_be_read_alone(tmp_path: Path) -> None:
    """Spans are where shards begin: in the midst of a row group, behind letters of several bytes and quoted lines."""
    pq.write_table(pa.table({"x": [f"p{row}" for row in range(11)]}), tmp_path / "a.parquet", row_group_size=4)
    lines = [f'{{"x": "\u00e4\u4e2d{row}"}}' + ("\r\n" if row % 2 else "\n\n") for row in range(7)]
    (tmp_path / "b.jsonl").write_bytes("".join(lines).encode() + b'{"x": "\xff\xed\xa0\x80"}')
    (tmp_path / "c.csv").write_bytes(b'x,y\n"a\r\nb",1\n\n"\xff,""c""",2\rd,3\ne"f,4\n\n')
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as stream:
        stream.write("".join(f'{{"x": {row}}}\n' for row in range(7)))
    (tmp_path / "e.csv").write_text("x\n")
    dataset = Dataset(str(tmp_path))
    for num_rows in (1, 2, 3, 4, 5, 100):
        whole = list(dataset.shards(num_rows, ["x"]))
        spans = list(dataset.spans(num_rows))
        alone = [shard for span in reversed(spans) for shard in reversed(list(dataset.read(span, ["x"])))]
        assert [_content(shard) for shard in whole] == [_content(shard) for shard in reversed(alone)]
        assert sum(shard.share for shard in whole) == pytest.approx(1.0, abs=0.1)
        assert sum(shard.share for shard in alone) == pytest.approx(1.0, abs=0.1)
    assert [len(span.num_rows) for span in dataset.spans(4)] == [1, 1, 1, 1, 1, 1, 2]


@pytest.mark.parametrize(
    "done", [{0}, {0, 1, 2}, {1}, {0, 2, 3}, set(range(6)), set(range(20)), {5, 6, 7, 8, 9}, set()]
)
def test_shards_that_are_done_are_counted_and_the_rest_is_as_ever(tmp_path: Path, done: set[int]) -> None:
    """Whatever is done of each file: indices, rows and shares of all shards, and the columns of those to do."""
    pq.write_table(pa.table({"x": [f"p{row}" for row in range(11)]}), tmp_path / "a.parquet", row_group_size=4)
    (tmp_path / "b.jsonl").write_text("".join(f'{{"x": "\u00e4{row}"}}\n\n' for row in range(7)))
    (tmp_path / "c.csv").write_text('x,y\n"a\nb",1\n\nc,2\nd,3\ne,4\n')
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as stream:
        stream.write("".join(f'{{"x": {row}}}\n' for row in range(7)))
    dataset = Dataset(str(tmp_path))
    whole = list(dataset.shards(3, ["x"]))
    resumed = list(dataset.shards(3, ["x"], done.__contains__))
    assert [_content(shard) for shard in resumed if shard.index not in done] == [
        _content(shard) for shard in whole if shard.index not in done
    ]
    assert [_place(shard) for shard in resumed] == [_place(shard) for shard in whole]
    assert sum(shard.share for shard in resumed) == pytest.approx(1.0, abs=0.1)
    if {0, 1} <= done:
        assert [shard.columns for shard in resumed[:2]] == [{}, {}]


def test_a_machine_that_sees_another_file_is_refused(tmp_path: Path) -> None:
    """A file of another size, or with other rows, than the driver of the job saw."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"x": 1}\n{"x": 2}\n')
    dataset = Dataset(str(path))
    (span,) = dataset.spans(8)
    path.write_text('{"x": 1}')
    with pytest.raises(InvalidArgumentError, match="has 8 bytes, and had 18 when the job began"):
        list(dataset.read(span, ["x"]))
    path.write_text('{"x": 1}         \n')
    with pytest.raises(InvalidArgumentError, match="has other rows than when the job began"):
        list(dataset.read(span, ["x"]))


def _place(shard: Shard) -> tuple[object, ...]:
    return shard.index, shard.first_row, shard.num_rows, shard.file


def _content(shard: Shard) -> tuple[object, ...]:
    values = shard.columns["x"]
    plain = values if isinstance(values, list) else values.to_pylist()
    return (shard.index, shard.first_row, shard.num_rows, shard.file, plain, shard.is_text, shard.faults)


def test_images_are_rows_of_path_and_content(tmp_path: Path) -> None:
    """Some to a shard, each row with its own file for messages; from any shard on the same rows."""
    for number in range(5):
        (tmp_path / f"{number}.png").write_bytes(bytes([number]))
    dataset = Dataset(str(tmp_path / "*.png"))
    assert dataset.is_of_row_files
    assert dataset.look(["content", "path"]).types == {"content": pa.binary(), "path": pa.string()}
    shards = list(dataset.shards(2, ["content"]))
    assert [shard.columns["content"] for shard in shards] == [[b"\0", b"\1"], [b"\2", b"\3"], [b"\4"]]
    assert [Path(path).name for path in shards[1].files] == ["2.png", "3.png"]
    assert [(shard.index, shard.first_row, round(shard.share, 9)) for shard in shards] == [
        (0, 0, 0.4),
        (1, 2, 0.4),
        (2, 4, 0.2),
    ]
    (_, second, _) = dataset.spans(2)
    assert next(dataset.read(second, ["path"])).files == shards[1].files
    assert list(dataset.shards(2, ["content"], {0, 1}.__contains__))[2].columns == shards[2].columns
    with pytest.raises(InvalidArgumentError, match=r"0\.png' has no column 'pixels'; .* path, content"):
        dataset.look(["pixels"])


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.csv.gz"])
def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path, name: str) -> None:
    """Nor does it shift the places of shards."""
    text = "x\n" + "1\n2\n3\n" if "csv" in name else '{"x": 1}\n{"x": 2}\n{"x": 3}\n'
    content = text.encode("utf-8-sig")
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    dataset = Dataset(str(tmp_path / name))
    rows = [shard.columns["x"] for shard in dataset.shards(2, ["x"])]
    assert rows in ([["1", "2"], ["3"]], [[1, 2], [3]])
    assert rows == [shard.columns["x"] for span in dataset.spans(2) for shard in dataset.read(span, ["x"])]


def test_what_files_say_at_their_begin(tmp_path: Path) -> None:
    """Types over all files, text where they differ, and the memory of a row; all that cannot be read are told."""
    pq.write_table(pa.table({"x": pa.array([1], pa.int32()), "y": [[0.5] * 1000], "z": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"x": 2, "y": [1], "z": "one"}\n{"x": 2.5}\n')
    look = Dataset(str(tmp_path)).look(["x", "y", "z"])
    assert (look.types["x"], look.types["z"]) == (pa.float64(), pa.string())
    assert look.row_bytes > 8000
    (tmp_path / "c.parquet").write_text("PAR1")
    (tmp_path / "d.csv").write_text("x,y\n")
    with pytest.raises(InvalidArgumentError, match=r"2 of 4 files cannot be read: .*c\.parquet.*; .*d\.csv"):
        Dataset(str(tmp_path)).look(["x", "z"])
    dataset = Dataset(str(tmp_path))
    dataset.look(["x", "z"], skips_bad=True)
    assert [Path(file.path).name for file in dataset.files] == ["a.parquet", "b.jsonl"]
    assert [Path(path).name for path in dataset.bad_files] == ["c.parquet", "d.csv"]


def test_numbers_that_json_lacks_are_faults(tmp_path: Path) -> None:
    """Python would take NaN and Infinity."""
    (tmp_path / "a.jsonl").write_text('{"x": NaN}\n{"x": -Infinity}\n{"x": 1}\n')
    (shard,) = Dataset(str(tmp_path / "a.jsonl")).shards(8, ["x"])
    assert [row for row, fault in shard.faults.items() if "is no value of JSON" in fault] == [0, 1]
