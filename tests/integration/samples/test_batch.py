"""Batch jobs over the sample mesh: exactly once for each row, whatever happens to the job."""

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

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


def _command(graph: str, source: Path, output: Path, url: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "weft.cli", "batch", graph, "--input", str(source), "--output", str(output)]
    return [*command, "--url", url, "--json", *arguments]


def _run(*arguments: object) -> subprocess.CompletedProcess[str]:
    graph, source, output, url, *rest = map(str, arguments)
    command = _command(graph, Path(source), Path(output), url, *rest)
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_every_row_is_answered_or_has_failed(mesh: Mapping[str, Endpoint], numbers: Path, tmp_path: Path) -> None:
    """Sums and differences stand beside the columns that are kept; rows without a value are in failed/ with why."""
    done = _run("simple", numbers, tmp_path / "o", mesh["router"].grpc, "--rows-per-shard", "1500", "--keep", "id")
    assert done.returncode == 3, done.stderr
    facts = json.loads(done.stdout)
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


def test_a_row_that_a_step_refuses_tells_how_far_it_came(mesh: Mapping[str, Endpoint], tmp_path: Path) -> None:
    """Status, message and way through the graph are those of a request of its own."""
    source = tmp_path / "pictures.jsonl"
    source.write_text('{"IMAGE": "no picture"}\n')
    done = _run("digits", source, tmp_path / "o", mesh["router"].grpc)
    assert done.returncode == 3, done.stderr
    (failed,) = [json.loads(line) for line in (tmp_path / "o/failed/part-000000.jsonl").read_text().splitlines()]
    assert failed["status"] == "INVALID_ARGUMENT"
    assert "decode" in failed["path"]


def test_a_job_that_is_killed_at_any_moment_ends_with_the_same_files(
    mesh: Mapping[str, Endpoint], numbers: Path, tmp_path: Path
) -> None:
    """Kill -9 again and again, then --resume: every file is that of a job that nobody disturbed, byte for byte."""
    shape = ("--rows-per-shard", "500", "--max-inflight", "2")
    whole = _run("simple", numbers, tmp_path / "whole", mesh["router"].grpc, *shape)
    assert whole.returncode == 3, whole.stderr
    generator = random.Random(0)
    killed = tmp_path / "killed"
    resume: tuple[str, ...] = ()
    for _ in range(4):
        process = subprocess.Popen(
            _command("simple", numbers, killed, mesh["router"].grpc, *shape, *resume),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            process.wait(generator.uniform(0.7, 2.5))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
        resume = ("--resume",) if (killed / "manifest.json").exists() else ()
    last = _run("simple", numbers, killed, mesh["router"].grpc, *shape, *resume)
    assert last.returncode == 3, last.stderr
    assert _files(killed) == _files(tmp_path / "whole")


def test_texts_are_embedded_from_lines_of_json(mesh: Mapping[str, Endpoint], tmp_path: Path) -> None:
    """A graph of three services over JSON Lines, with a line that is broken, into JSON Lines."""
    texts = [json.dumps({"sentence": "parcel " * (1 + row % 20)}) for row in range(70)]
    (tmp_path / "in.jsonl").write_text("\n".join([*texts[:5], "{", *texts[5:]]))
    arguments = ("--column", "TEXT=sentence", "--output-format", "jsonl")
    done = _run("embed", tmp_path / "in.jsonl", tmp_path / "o", mesh["router"].grpc, *arguments)
    assert done.returncode == 3, done.stderr
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
_CONFIG = """backend: "python" max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 1 }
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
"""


def test_a_mesh_of_its_own_loads_what_is_called_and_gives_way_to_nobody(tmp_path: Path) -> None:
    """Of two models with priorities one is loaded, and requests have its largest batch; two columns are one tensor."""
    for name in ("used", "other"):
        version = tmp_path / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "model.py").write_text(_MODEL)
        (version.parent / "config.pbtxt").write_text(_CONFIG)
    (tmp_path / "in.csv").write_text("a,b\n" + "1,2.5\n" * 20 + "1e39,0\n", encoding="utf-8-sig")
    command = [sys.executable, "-P", "-m", "weft.cli", "batch", "used", "--input", str(tmp_path / "in.csv"), "--json"]
    command += ["--output", str(tmp_path / "o"), "--repository", str(tmp_path / "models"), "--column", "X=a,b"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 3, done.stderr
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
    mesh: Mapping[str, Endpoint],
    numbers: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    graph: str,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    """One line on standard error, exit status 1."""
    command = ["batch", graph, "--input", str(numbers), "--output", str(tmp_path / "o"), "--url", mesh["router"].grpc]
    assert 1 == main([*command, *arguments])
    assert message in capsys.readouterr().err
