"""Batch jobs over the sample mesh: exactly once for each row, whatever happens to the job."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.repositories import write_model

from weft.base.processes.process import Endpoint
from weft.cli.__main__ import main

NUM_ROWS = 6_000
#: Long enough for a job that shares its cores with others.
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows for `simple`, a few of which have no value."""
    path = tmp_path_factory.mktemp("data") / "numbers.parquet"
    values = np.arange(NUM_ROWS * 16, dtype=np.int32).reshape(NUM_ROWS, 16)
    rows = [None if row % 1000 == 999 else list(value) for row, value in enumerate(values)]
    table = pa.table({"INPUT0": pa.array(rows, pa.list_(pa.int32())), "INPUT1": list(values), "id": range(NUM_ROWS)})
    pq.write_table(table, path)
    return path


class Done(NamedTuple):
    """Exit status and texts of a job."""

    status: int
    out: str
    err: str


Run = Callable[..., Done]


def _arguments(graph: str, source: Path, output: Path, url: str, *more: str) -> list[str]:
    return ["batch", graph, "--input", str(source), "--output", str(output), "--url", url, "--json", *more]


@pytest.fixture
def run(mesh: Mapping[str, Endpoint], capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a job over the mesh, in this process."""

    def job(graph: str, source: Path, output: Path, *more: str) -> Done:
        status = main(_arguments(graph, source, output, mesh["router"].grpc, *more))
        return Done(status, *capsys.readouterr())

    return job


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_row_is_answered_or_has_failed(run: Run, numbers: Path, tmp_path: Path) -> None:
    """Sums and differences stand beside the columns that are kept; rows without a value are in failed/ with why."""
    done = run("simple", numbers, tmp_path / "o", "--rows-per-shard", "1500", "--keep", "id")
    assert done.status == 3, done.err
    facts = json.loads(done.out)
    assert (facts["num_rows"], facts["num_failed"], facts["num_skipped"]) == (NUM_ROWS, 6, 0)
    table = pq.read_table(tmp_path / "o" / "rows")
    assert table.column_names == ["row", "id", "OUTPUT0", "OUTPUT1"]
    rows = table["row"].to_pylist()
    assert rows == [row for row in range(NUM_ROWS) if row % 1000 != 999]
    assert table["id"].to_pylist() == rows
    assert table.schema.field("id").type == pa.int64()
    sums = np.array(table["OUTPUT0"].to_pylist())
    assert (sums == 2 * (np.array(rows)[:, None] * 16 + np.arange(16))).all()
    assert not np.array(table["OUTPUT1"].to_pylist()).any()
    failed = [
        json.loads(line) for path in sorted((tmp_path / "o/failed").iterdir()) for line in path.read_text().splitlines()
    ]
    assert [row["row"] for row in failed] == [row for row in range(NUM_ROWS) if row % 1000 == 999]
    assert [row["kept"] for row in failed] == [{"id": row["row"]} for row in failed]
    assert {row["message"] for row in failed} == {"'INPUT0' has no value"}


def test_a_row_that_a_step_refuses_tells_how_far_it_came(run: Run, tmp_path: Path) -> None:
    """Status, message and way through the graph are those of a request of its own."""
    source = tmp_path / "pictures.jsonl"
    source.write_text('{"IMAGE": "no picture"}\n')
    done = run("digits", source, tmp_path / "o")
    assert done.status == 3, done.err
    (failed,) = [json.loads(line) for line in (tmp_path / "o/failed/part-000000.jsonl").read_text().splitlines()]
    assert failed["status"] == "INVALID_ARGUMENT"
    assert "decode" in failed["path"]


def test_a_job_that_is_killed_at_any_moment_ends_with_the_same_files(
    run: Run, mesh: Mapping[str, Endpoint], numbers: Path, tmp_path: Path
) -> None:
    """Kill -9 again and again, then --resume: every file is that of a job that nobody disturbed, byte for byte."""
    shape = ("--rows-per-shard", "500", "--max-inflight", "2")
    whole = run("simple", numbers, tmp_path / "whole", *shape)
    assert whole.status == 3, whole.err
    generator = random.Random(0)
    killed = tmp_path / "killed"
    resume: tuple[str, ...] = ()
    for _ in range(4):
        command = _arguments("simple", numbers, killed, mesh["router"].grpc, *shape, *resume)
        process = subprocess.Popen([sys.executable, "-P", "-m", "weft.cli", *command], stdout=subprocess.DEVNULL)
        try:
            process.wait(generator.uniform(0.7, 2.5))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.wait(TIMEOUT_S)
        resume = ("--resume",) if (killed / "manifest.json").exists() else ()
    last = run("simple", numbers, killed, *shape, *resume)
    assert last.status == 3, last.err
    assert _files(killed) == _files(tmp_path / "whole")


def test_texts_are_embedded_from_lines_of_json(run: Run, tmp_path: Path) -> None:
    """A graph of three services over JSON Lines, with a line that is broken, into JSON Lines."""
    texts = [json.dumps({"sentence": "parcel " * (1 + row % 20)}) for row in range(70)]
    (tmp_path / "in.jsonl").write_text("\n".join([*texts[:5], "{", *texts[5:]]))
    arguments = ("--column", "TEXT=sentence", "--output-format", "jsonl")
    done = run("embed", tmp_path / "in.jsonl", tmp_path / "o", *arguments)
    assert done.status == 3, done.err
    lines = [json.loads(line) for line in (tmp_path / "o/rows/part-000000.jsonl").read_text().splitlines()]
    assert [line["row"] for line in lines] == [row for row in range(71) if row != 5]
    norms = np.linalg.norm(np.array([line["EMBEDDING"] for line in lines]), axis=1)
    assert np.allclose(norms, 1.0, atol=1e-5)


_MODEL = """
import pathlib
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        (pathlib.Path(pb_utils.get_model_dir()) / "loaded").touch()

    def execute(self, requests):
        tensors = [request.inputs()[0].as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", tensor)]) for tensor in tensors]
"""
_CONFIG = """max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 1 }
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def test_a_mesh_of_its_own_loads_what_is_called_and_gives_way_to_nobody(tmp_path: Path) -> None:
    """Of two models with priorities one is loaded, and requests have its largest batch; two columns are one tensor."""
    for name in ("used", "other"):
        write_model(tmp_path / "models", name, _MODEL, _CONFIG)
    (tmp_path / "in.csv").write_text("a,b\n" + "1,2.5\n" * 20 + "1e39,0\n", encoding="utf-8-sig")
    command = ["batch", "used", "--input", str(tmp_path / "in.csv"), "--output", str(tmp_path / "o")]
    assert 3 == main([*command, "--repository", str(tmp_path / "models"), "--column", "X=a,b"])
    assert pq.read_table(tmp_path / "o/rows")["Y"].to_pylist() == [[1.0, 2.5]] * 20
    assert "'X' does not fit FP32, it is too large" in (tmp_path / "o/failed/part-000000.jsonl").read_text()
    assert json.loads((tmp_path / "o/manifest.json").read_bytes())["rows_per_request"] == 8
    loaded = [(tmp_path / "models" / name / "1/loaded").exists() for name in ("used", "other")]
    assert loaded == [True, False]


@pytest.mark.parametrize(
    ("graph", "arguments", "message"),
    [
        ("nosuch", (), "NOT_FOUND"),
        ("simple", ("--column", "INPUT2=x"), "--column 'INPUT2': simple has none; did you mean"),
        ("simple", ("--column", "INPUT0=nosuch"), "has no column 'nosuch'"),
        ("simple", ("--write", "Y"), "--write 'Y': simple has none"),
        ("simple", ("--rows-per-request", "9"), "must be from 1 to 8, the largest batch of 'simple', got 9"),
        ("simple", ("--keep", "OUTPUT0"), "the output has a column of that name already"),
        ("simple", ("--max-failures", "0"), "more than 0 rows failed"),
        ("simple", ("--resume",), "no job was begun"),
        (
            "writer",
            ("--column", "text_input=id"),
            "a column of type int64 does not fit the input 'text_input', BYTES[1]",
        ),
    ],
)
def test_jobs_that_cannot_be_done_say_why(
    run: Run, numbers: Path, tmp_path: Path, graph: str, arguments: tuple[str, ...], message: str
) -> None:
    """One line on standard error, exit status 1."""
    done = run(graph, numbers, tmp_path / "o", *arguments)
    assert 1 == done.status
    assert message in done.err
