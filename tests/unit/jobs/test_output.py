"""The folder that a job writes."""

import errno
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.base.errors import AlreadyExistsError, InvalidArgumentError, NotFoundError, UnavailableError
from weft.jobs.atomic_files import held
from weft.jobs.output import FailedRow, OutputFolder, begin

SCHEMA = pa.schema([("row", pa.int64()), ("Y", pa.binary())])
COLUMNS = {"Y": pa.array([b"a", b"b"]), "row": pa.array([0, 2])}
FAILED = [FailedRow(1, "in.csv", "INVALID_ARGUMENT", "no value", "root>a")]


def test_a_shard_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves neither a part nor a temporary file; the shard is then written as if nothing had been."""
    folder = OutputFolder(tmp_path, "parquet", SCHEMA)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            folder.write(0, COLUMNS, [])
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    folder.write(0, COLUMNS, FAILED)
    assert folder.is_done(0)
    assert folder.num_failed() == 1
    assert pq.read_table(tmp_path / "rows" / "part-000000.parquet").to_pydict() == {"row": [0, 2], "Y": [b"a", b"b"]}


def test_failures_of_a_shard_that_is_not_done_do_not_count(tmp_path: Path) -> None:
    """A job that died between the two files of a shard writes both again."""
    folder = OutputFolder(tmp_path, "jsonl", SCHEMA)
    folder.write(0, COLUMNS, FAILED)
    (tmp_path / "rows" / "part-000000.jsonl").unlink()
    assert folder.num_failed() == 0
    folder.write(0, COLUMNS, [])
    assert not (tmp_path / "failed" / "part-000000.jsonl").exists()
    assert (tmp_path / "rows" / "part-000000.jsonl").read_text() == '{"row": 0, "Y": "YQ=="}\n{"row": 2, "Y": "Yg=="}\n'


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    """Several processes may write a shard at once; how often one was begun counts until then, too."""
    folder = OutputFolder(tmp_path, "jsonl", SCHEMA, "host-7")
    assert [folder.begin(0), folder.begin(0), folder.begin(1)] == [0, 1, 0]
    folder.write(0, COLUMNS, FAILED)
    assert folder.failed_in(0) == FAILED
    assert folder.failed_in(1) == []
    whole = sorted(tmp_path.glob("*/part-*"))
    for path in whole:
        path.with_name(f"{path.name}.host-8.tmp").write_text("{")
    folder.remove_unfinished()
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == whole
    assert folder.begin(0) == 0


def test_one_job_at_a_time_holds_a_folder(tmp_path: Path) -> None:
    """A second job on the folder is refused, until the first one has ended."""
    with held(tmp_path / "o"), pytest.raises(UnavailableError, match="another job"), held(tmp_path / "o"):
        pass
    with held(tmp_path / "o"):
        pass


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"graph": "b"}, 'graph was "a", is "b"'),
        ({"rows_per_shard": 2}, "rows_per_shard was null, is 2"),
        ({"new": 1}, "new was null"),
        ({"lock": "b"}, 'a model that it calls, is another: lock was null, is "b"'),
    ],
)
def test_a_job_goes_on_with_what_it_began_with(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """The manifest of the job has to be that of the folder; the error says what differs."""
    manifest: dict[str, Any] = {"graph": "a", "files": [1]}
    with pytest.raises(NotFoundError, match="no job was begun"):
        begin(tmp_path, manifest, resume=True)
    begin(tmp_path, manifest, resume=False)
    begin(tmp_path, manifest, resume=True)
    with pytest.raises(InvalidArgumentError) as caught:
        begin(tmp_path, manifest | change, resume=True)
    assert message in caught.value.message
    with pytest.raises(AlreadyExistsError, match="--resume goes on"):
        begin(tmp_path, manifest, resume=False)


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    """A new job wants an empty folder; hidden files do not count."""
    (tmp_path / ".hidden").touch()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(AlreadyExistsError, match=r"it has notes\.txt"):
        begin(tmp_path, {}, resume=False)
    os.unlink(tmp_path / "notes.txt")
    begin(tmp_path, {}, resume=False)
    for content in ("", "{", "[]", "3"):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(InvalidArgumentError, match="is damaged"):
            begin(tmp_path, {}, resume=True)
