"""Batch jobs on a bad day: each ends with an error that says what to do, and goes on once that is done."""

import asyncio
import gzip
import json
import random
import resource
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.base.errors import InvalidArgumentError, UnavailableError
from weft.base.processes.process import Endpoint
from weft.jobs.batch import BatchOptions, Progress, run_batch
from weft.v2.client.v2_client import V2Client

NUM_ROWS = 120
ROW = {"INPUT0": list(range(16)), "INPUT1": [1] * 16}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Three files of rows for `simple`."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name in "abc":
        draw = random.Random(name)
        lines = [json.dumps({**ROW, "id": draw.randbytes(200).hex()}) for _ in range(NUM_ROWS // 3)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def run(mesh: Mapping[str, Endpoint], tmp_path: Path) -> Callable[..., Progress]:
    """Runs a job of `simple` in shards of 20 rows."""

    def run(source: Path, on_progress: Callable[[Progress], None] | None = None, **changes: Any) -> Progress:
        values: dict[str, Any] = {
            "graph": "simple",
            "input": str(source),
            "output": tmp_path / "out",
            "rows_per_shard": 20,
        }
        values |= {"keep": ["id"]} | changes

        async def job() -> Progress:
            async with V2Client(mesh["router"].grpc) as client:
                return await run_batch(client, BatchOptions(**values), on_progress)

        return asyncio.run(job())

    return run


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Whatever writes more to a file fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def files(folder: Path) -> dict[str, bytes]:
    """What a job has written."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def after(num_rows: int, act: Callable[[], object]) -> Callable[[Progress], None]:
    """Acts once so many rows are written."""
    done: list[object] = []

    def on_progress(progress: Progress) -> None:
        if progress.num_rows >= num_rows and not done:
            done.append(act())

    return on_progress


def test_a_full_disk_leaves_no_half_file(run: Callable[..., Progress], source: Path, tmp_path: Path) -> None:
    """The error is that of the disk; with room again the job ends with the files of one that always had it."""
    run(source, output=tmp_path / "whole")
    for _ in range(2):
        with files_of_at_most(4000), pytest.raises(OSError, match="File too large"):
            run(source, resume=(tmp_path / "out/manifest.json").exists())
        assert sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file()) == [
            ".lock",
            "manifest.json",
        ]
    assert run(source, resume=True).num_rows == NUM_ROWS
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_file_that_vanishes_ends_the_job(run: Callable[..., Progress], source: Path, tmp_path: Path) -> None:
    """Once it is there again the job goes on, with what it had."""
    run(source, output=tmp_path / "whole")
    last = source / "c.jsonl"
    with pytest.raises(FileNotFoundError, match=r"c\.jsonl"):
        run(source, after(20, lambda: last.rename(tmp_path / "kept")))
    (tmp_path / "kept").rename(last)
    end = run(source, resume=True)
    assert end.num_rows == NUM_ROWS
    assert end.num_skipped >= 20
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_file_that_changes_ends_the_job(
    run: Callable[..., Progress], source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of the new content would stand under the digest of the old; --resume does that file anew, and says so."""
    last = source / "c.jsonl"
    before = last.read_bytes()
    with pytest.raises(InvalidArgumentError, match=r"c\.jsonl' has changed while the job ran"):
        run(source, after(20, lambda: last.write_bytes(before.replace(b"[0, 1,", b"[1, 1,"))))
    assert run(source, resume=True).num_rows == NUM_ROWS
    assert "files of the data set have changed since the job was begun" in caplog.text
    run(source, output=tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("is_mended", [True, False], ids=["mended", "removed"])
def test_a_damaged_file_is_told_before_any_work_and_passed_over(
    run: Callable[..., Progress], source: Path, tmp_path: Path, *, is_mended: bool
) -> None:
    """With --skip-bad-files the others are done; mended or removed, --resume ends as if nothing had been wrong."""
    bad, content = source / "b.jsonl.gz", gzip.compress((source / "b.jsonl").read_bytes())
    (source / "b.jsonl").unlink()
    bad.write_bytes(content[:5])
    told: list[Progress] = []
    with pytest.raises(InvalidArgumentError, match=r"1 of 3 files cannot be read: .*b\.jsonl\.gz' cannot be unpacked"):
        run(source, told.append)
    assert not told
    end = run(source, skip_bad_files=True)
    assert (end.num_bad_files, end.num_failed, end.num_rows < NUM_ROWS) == (1, 0, True)
    if is_mended:
        bad.write_bytes(content)
    else:
        bad.unlink()
    end = run(source, resume=True)
    assert (end.num_bad_files, end.num_skipped > 0) == (0, True)
    run(source, output=tmp_path / "whole")
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_one_job_at_a_time_writes_to_a_folder(run: Callable[..., Progress], source: Path) -> None:
    """Another one, resumed or not, is told so, and the first is not disturbed."""
    refused: list[str] = []

    def another() -> None:
        for resume in (False, True):
            with ThreadPoolExecutor() as pool, pytest.raises(UnavailableError) as caught:
                pool.submit(run, source, resume=resume).result()
            refused.append(caught.value.message)

    assert run(source, after(20, another)).num_rows == NUM_ROWS
    assert ["another job writes to" in message for message in refused] == [True, True]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl.gz", gzip.compress(json.dumps(ROW).encode() * 50, mtime=0)[:-30], "cannot be unpacked"),
        ("a.jsonl.gz", b"no gzip", "cannot be unpacked"),
        ("a.parquet", b"PAR1" + b"\0" * 100 + b"PAR1", "is no Parquet file that can be read"),
    ],
)
def test_damaged_files_are_named(
    run: Callable[..., Progress], tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    """Cut off, or something else."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        run(tmp_path / name)
    assert name in caught.value.message


def test_files_and_row_groups_without_rows(run: Callable[..., Progress], tmp_path: Path) -> None:
    """Nothing is written for them, and a job over nothing else ends at once."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.jsonl").write_text("\n\n")
    assert run(tmp_path / "in", output=tmp_path / "empty", keep=())[:3] == (0, 0, 0)
    table = pa.table({"INPUT0": [ROW["INPUT0"]] * 3, "INPUT1": [ROW["INPUT1"]] * 3}).cast(
        pa.schema([(name, pa.list_(pa.int32())) for name in ROW])
    )
    with pq.ParquetWriter(tmp_path / "in/b.parquet", table.schema) as writer:
        for part in (table.slice(0, 0), table, table.slice(0, 0)):
            writer.write_table(part)
    pq.write_table(table.slice(0, 0), tmp_path / "in/c.parquet")
    assert run(tmp_path / "in", keep=()).num_rows == 3
    assert pq.read_table(tmp_path / "out/rows")["row"].to_pylist() == [0, 1, 2]


def test_a_huge_row_fails_alone(run: Callable[..., Progress], tmp_path: Path) -> None:
    """Megabytes where 16 numbers belong, in JSON Lines or CSV: its neighbours are answered, its cause is short."""
    huge = json.dumps(list(range(400_000)))
    lines = [json.dumps(ROW), f'{{"INPUT0": {huge}, "INPUT1": []}}', json.dumps(ROW)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    cells = [f'"{ROW["INPUT0"]}","{ROW["INPUT1"]}"', f'"{huge}","[]"']
    (tmp_path / "a.csv").write_text("\n".join(["INPUT0,INPUT1", *cells]))
    for name, num_rows in (("a.jsonl", 3), ("a.csv", 2)):
        output = tmp_path / f"out-{name}"
        end = run(tmp_path / name, output=output, keep=())
        assert (end.num_rows, end.num_failed) == (num_rows, 1)
        (failed,) = (output / "failed").glob("*")
        assert "has shape [400000], which does not fit [16]" in failed.read_text()
        assert failed.stat().st_size < 1000


@pytest.mark.parametrize("output", ["/proc/weft-batch", "/dev/null/out"])
def test_an_output_that_cannot_be_written(run: Callable[..., Progress], source: Path, output: str) -> None:
    """The error is that of the system, before the first row."""
    with pytest.raises(OSError, match=output.rpartition("/")[0]):
        run(source, output=Path(output))
