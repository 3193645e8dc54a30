"""A job that is resumed in one process: what it reads again, and what it leaves."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from weft.base.core import InferCall, InferResult
from weft.base.errors import RemoteError
from weft.jobs import batch as batch_module
from weft.jobs import dataset as dataset_module
from weft.jobs import shard as shard_module
from weft.jobs.batch import BatchOptions, Progress, run_batch
from weft_protos import grpc_service_pb2 as pb
from weft_protos.model_config_pb2 import ModelConfig

NUM_ROWS, ROWS_PER_SHARD = 40, 4


class Echo:
    """A server of one model, which answers with its input."""

    async def config(self, *_: Any, **__: Any) -> ModelConfig:
        config = ModelConfig(name="echo")
        config.input.add(name="X", data_type="TYPE_STRING", dims=[1])
        config.output.add(name="Y", data_type="TYPE_STRING", dims=[1])
        return config

    async def model_metadata(self, *_: Any, **__: Any) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(versions=["1"])

    async def index(self, **_: Any) -> Sequence[Any]:
        return []

    async def infer(self, call: InferCall, **_: Any) -> InferResult:
        return InferResult("echo", "1", "", {}, {"Y": call.inputs["X"]})


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.*")) if path.is_file()}


@pytest.mark.parametrize("missing", [{7}, {9, 10, 11, 12}, {0}, {2, 19}, set()])
def test_the_files_are_those_of_a_job_that_nobody_disturbed(
    tmp_path: Path, missing: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte, and shards that are done at the begin of a file are not read again."""
    data = tmp_path / "data"
    data.mkdir()
    rows = [f"text {row} \u00e4" for row in range(NUM_ROWS)]
    pq.write_table(pa.table({"X": rows, "id": range(NUM_ROWS)}), data / "a.parquet", row_group_size=7)
    (data / "b.jsonl").write_text("".join(f'{{"X": "{row}", "id": {row}}}\n' for row in range(NUM_ROWS)))
    options = BatchOptions("echo", str(data), tmp_path / "whole", rows_per_shard=ROWS_PER_SHARD, keep=["id"])
    asyncio.run(run_batch(Echo(), options))  # type: ignore[arg-type]
    whole = _files(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "killed")
    for index in missing:
        (tmp_path / f"killed/rows/part-{index:06}.parquet").unlink()
    read: list[int] = []
    made = dataset_module._shard

    def counted(index: int, *others: Any) -> dataset_module.Shard:
        shard = made(index, *others)
        read.extend([index] if shard.columns else [])
        return shard

    monkeypatch.setattr(dataset_module, "_shard", counted)
    end = asyncio.run(run_batch(Echo(), replace(options, output=tmp_path / "killed", resume=True)))  # type: ignore[arg-type]
    assert _files(tmp_path / "killed") == whole
    assert (end.num_rows, end.num_skipped) == (2 * NUM_ROWS, 2 * NUM_ROWS - ROWS_PER_SHARD * len(missing))
    per_file = NUM_ROWS // ROWS_PER_SHARD
    firsts = [min((index for index in missing if index // per_file == file), default=None) for file in (0, 1)]
    assert read == [
        index for file, first in enumerate(firsts) if first is not None for index in range(first, (file + 1) * per_file)
    ]


class _EchoWithLevels(Echo):
    """Takes batches of 8 with priority levels; its index is empty while it starts."""

    is_ready = True

    async def config(self, *_: Any, **__: Any) -> ModelConfig:
        config = await super().config()
        config.max_batch_size = 8
        config.dynamic_batching.priority_levels = 2
        return config

    async def index(self, **_: Any) -> Sequence[Any]:
        return [SimpleNamespace(name="echo")] if self.is_ready else []


def test_the_rows_of_a_request_are_those_of_the_job_that_was_begun(tmp_path: Path) -> None:
    """Also where models with priorities, which make them few, are not ready yet when the job is resumed."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"X": "{row}"}}\n' for row in range(NUM_ROWS)))
    server = _EchoWithLevels()
    options = BatchOptions("echo", str(data), tmp_path / "out", rows_per_shard=ROWS_PER_SHARD)
    asyncio.run(run_batch(server, options))  # type: ignore[arg-type]
    whole = _files(tmp_path / "out")
    next((tmp_path / "out/rows").iterdir()).unlink()
    server.is_ready = False
    asyncio.run(run_batch(server, replace(options, resume=True)))  # type: ignore[arg-type]
    assert whole == _files(tmp_path / "out")


class _Failing(Echo):
    """Answers so many requests, and is gone then; counts what it is asked."""

    def __init__(self, num_answers: int) -> None:
        self.asked: list[bytes] = []
        self._num_answers = num_answers

    async def config(self, *_: Any, **__: Any) -> ModelConfig:
        config = await super().config()
        config.max_batch_size = 2
        return config

    async def infer(self, call: InferCall, **_: Any) -> InferResult:
        if len(self.asked) == self._num_answers:
            raise RemoteError("PERMISSION_DENIED", "the key was withdrawn")
        self.asked.append(bytes(call.inputs["X"].data))
        return await super().infer(call)


@pytest.mark.parametrize("num_answers", [1, 7, 19])
def test_what_is_answered_of_a_shard_is_not_asked_again(
    tmp_path: Path, num_answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One large shard ends in its middle: a resumed job asks for the rest, and ends with the same files."""
    monkeypatch.setattr(shard_module, "CHECKPOINT_S", 0.0)
    data = tmp_path / "rows.jsonl"
    bad = '{"X": 5}\n'  # a row that fails
    data.write_text(bad + "".join(f'{{"X": "{row} ä"}}\n' for row in range(NUM_ROWS)))
    options = BatchOptions("echo", str(data), tmp_path / "whole", max_inflight=1)
    whole = _Failing(-1)
    asyncio.run(run_batch(whole, options))  # type: ignore[arg-type]
    cut = replace(options, output=tmp_path / "cut")
    with pytest.raises(RemoteError, match="withdrawn"):
        asyncio.run(run_batch(_Failing(num_answers), cut))  # type: ignore[arg-type]
    rest, told = _Failing(-1), list[Progress]()
    end = asyncio.run(run_batch(rest, replace(cut, resume=True), told.append))  # type: ignore[arg-type]
    assert rest.asked == whole.asked[num_answers:]
    assert _files(tmp_path / "cut") == _files(tmp_path / "whole")
    assert (end.num_rows, end.num_failed, end.num_skipped) == (NUM_ROWS + 1, 1, 2 * num_answers)
    assert not any((tmp_path / "cut/.answers").iterdir())


def test_progress_is_told_while_a_shard_is_in_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row, with the share of the data set that is answered."""
    monkeypatch.setattr(batch_module, "_TELL_S", 0.0)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"X": "{row}"}}\n' for row in range(4)))
    told: list[Progress] = []
    asyncio.run(run_batch(Echo(), BatchOptions("echo", str(data), tmp_path / "out"), told.append))  # type: ignore[arg-type]
    assert [(0, 0, 0.0), (0, 1, 0.25), (0, 2, 0.5), (0, 3, 0.75), (0, 4, 1.0), (4, 0, 0.0)] == [
        (progress.num_rows, progress.num_open, progress.share_open) for progress in told
    ]


def test_columns_that_are_kept_keep_their_types(tmp_path: Path) -> None:
    """Numbers, times and lists, of rows that are answered and of those that failed; text of JSON as it is."""
    table = pa.table(
        {
            "X": ["a", None, "b"],
            "id": pa.array([1, 2, 3], pa.int64()),
            "at": pa.array([0, 1, 2], pa.timestamp("us", "UTC")),
            "tags": [["x"], [], ["y", "z"]],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    options = BatchOptions("echo", str(tmp_path / "a.parquet"), tmp_path / "out", keep=["id", "at", "tags"])
    asyncio.run(run_batch(Echo(), options))  # type: ignore[arg-type]
    kept = pq.read_table(tmp_path / "out/rows").select(["id", "at", "tags"])
    assert kept.equals(table.select(["id", "at", "tags"]).take([0, 2]))
    (failed,) = (tmp_path / "out/failed/part-000000.jsonl").read_text().splitlines()
    assert json.loads(failed)["kept"] == {"id": 2, "at": "1970-01-01 00:00:00.000001+00:00", "tags": []}
    lines = replace(options, output=tmp_path / "lines", output_format="jsonl")
    asyncio.run(run_batch(Echo(), lines))  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (tmp_path / "lines/rows/part-000000.jsonl").read_text().splitlines()]
    assert [(row["id"], row["at"], row["tags"]) for row in rows] == [
        (1, "1970-01-01 00:00:00+00:00", ["x"]),
        (3, "1970-01-01 00:00:00.000002+00:00", ["y", "z"]),
    ]


def test_shards_of_wide_rows_have_fewer_of_them(tmp_path: Path) -> None:
    """So many that they fit into memory, unless the job says how many; a resumed job has as many as before."""
    pq.write_table(pa.table({"X": ["x" * 3_000_000] * 100}), tmp_path / "a.parquet", use_dictionary=False)
    options = BatchOptions("echo", str(tmp_path / "a.parquet"), tmp_path / "out")
    asyncio.run(run_batch(Echo(), options))  # type: ignore[arg-type]
    parts = sorted((tmp_path / "out/rows").iterdir())
    assert [pq.read_metadata(part).num_rows for part in parts] == [44, 44, 12]
    parts[1].unlink()
    end = asyncio.run(run_batch(Echo(), replace(options, resume=True)))  # type: ignore[arg-type]
    assert (end.num_rows, end.num_skipped) == (100, 56)
