"""Batch jobs on a real Ray cluster of two nodes: the files are those of a job in one process, whoever dies."""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.samples.ray_cluster import descendants, running_cluster

from weft.base.processes.process import Endpoint

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

pytestmark = pytest.mark.long

SAMPLES = Path(__file__).resolve().parents[3] / "model_repository"
NUM_ROWS, ROWS_PER_SHARD = 2_400, 200
TIMEOUT_S = 120


class Job(NamedTuple):
    """What jobs of a test have in common.

    Attributes:
        data: The data set.
        url: Of the router.
        address: Of the cluster.
        cluster: Id of the process that the cluster descends from.
        files: What a job in one process writes.
    """

    data: Path
    url: str
    address: str
    cluster: int
    files: Mapping[str, bytes]


def _command(data: Path, output: Path, *arguments: str) -> list[str]:
    return [
        *(sys.executable, "-P", "-m", "weft.cli", "batch", "simple", "--input", str(data), "--output", str(output)),
        *("--rows-per-shard", str(ROWS_PER_SHARD), "--rows-per-request", "1", "--max-inflight", "4"),
        *("--json", "--keep", "id", *arguments),
    ]


def _on_ray(job: Job, output: Path, *arguments: str) -> "subprocess.Popen[str]":
    engine = ("--engine", "ray", "--ray-address", job.address)
    command = _command(job.data, output, "--url", job.url, *engine, *arguments)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _files(folder: Path) -> dict[str, bytes]:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _until_parts(output: Path, number: int, process: "subprocess.Popen[str]") -> None:
    """Return once so many shards are done, but not all."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (found := len(list((output / "rows").glob("part-??????.parquet")))) < number:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert found < NUM_ROWS / ROWS_PER_SHARD


def _is_served(repository: Path) -> bool:
    """Whether a process has this repository among its arguments."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            if str(repository).encode() in path.read_bytes().split(b"\0"):
                return True
    return False


@pytest.fixture(scope="module")
def job(mesh: Mapping[str, Endpoint], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Two files of rows for `simple`, a few of which have no value, and a cluster."""
    folder, whole = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("whole")
    values = np.arange(NUM_ROWS * 16, dtype=np.int32).reshape(NUM_ROWS, 16)
    rows = [None if row % 500 == 499 else value.tolist() for row, value in enumerate(values)]
    table = pa.table({"INPUT0": pa.array(rows, pa.list_(pa.int32())), "INPUT1": list(values), "id": range(NUM_ROWS)})
    pq.write_table(table.slice(0, 1_500), folder / "a.parquet", row_group_size=333)
    (folder / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table.slice(1_500).to_pylist()))
    url = mesh["router"].grpc
    command = _command(folder, whole, "--url", url)
    with running_cluster() as (address, process_id):
        subprocess.run(command, check=False, capture_output=True, timeout=TIMEOUT_S)
        yield Job(folder, url, address, process_id, _files(whole))


def test_a_worker_that_is_killed_costs_nothing(job: Job, tmp_path: Path) -> None:
    """Kill -9 of one of two workers in mid job: Ray replaces it, and every file is that of a job in one process."""
    with _on_ray(job, tmp_path / "o") as process:
        _until_parts(tmp_path / "o", 1, process)
        (worker, *_) = descendants(job.cluster, "ray::MapWorker")
        os.kill(worker, signal.SIGKILL)
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, errors
    facts = json.loads(output)
    assert (facts["num_rows"], facts["num_failed"], facts["num_skipped"]) == (NUM_ROWS, 4, 0)
    assert _files(tmp_path / "o") == job.files


def test_a_driver_that_ends_leaves_what_can_be_resumed(job: Job, tmp_path: Path) -> None:
    """Ctrl-C, then kill -9, each with --resume, the last time without Ray: the same files byte for byte."""
    output = tmp_path / "o"
    with _on_ray(job, output) as process:
        _until_parts(output, 1, process)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "--resume goes on" in errors) == (130, True), errors
    assert "Traceback" not in errors
    num_parts = len(list((output / "rows").glob("part-??????.parquet")))
    with _on_ray(job, output, "--resume") as process:
        _until_parts(output, num_parts + 1, process)
        process.kill()
        process.communicate()
    command = _command(job.data, output, "--url", job.url, "--resume")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["num_skipped"] >= num_parts * ROWS_PER_SHARD
    assert _files(output) == job.files


def test_damaged_pages_are_passed_over(job: Job, tmp_path: Path) -> None:
    """Damage that no look at the schema shows: with --skip-bad-files all shards but that one are answered."""
    data = tmp_path / "data"
    shutil.copytree(job.data, data)
    damaged = data / "a.parquet"
    table = pq.read_table(damaged)
    pq.write_table(table, damaged, row_group_size=ROWS_PER_SHARD)
    pages = pq.ParquetFile(damaged).metadata.row_group(1).column(0)
    with damaged.open("r+b") as stream:
        stream.seek(pages.data_page_offset)
        stream.write(b"\xff" * 64)
    of_damaged = job._replace(data=data)
    with _on_ray(of_damaged, tmp_path / "o", "--skip-bad-files") as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 3, errors
    assert "rows of '" in errors
    assert "a.parquet' are passed over" in errors
    facts = json.loads(output)
    assert (facts["num_rows"], facts["num_bad_files"]) == (NUM_ROWS - ROWS_PER_SHARD, 1)
    rows = {name: content for name, content in job.files.items() if name.startswith("rows")}
    del rows["rows/part-000001.parquet"]
    assert {name: content for name, content in _files(tmp_path / "o").items() if name.startswith("rows")} == rows
    with _on_ray(of_damaged, tmp_path / "refused") as process:
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "a.parquet' is no Parquet file that can be read" in errors


def test_models_in_the_workers_answer_as_those_of_a_mesh(job: Job, tmp_path: Path) -> None:
    """With --in-process each worker runs a mesh of its own: the same files, and no process of it is left."""
    repository = tmp_path / "repository"
    shutil.copytree(SAMPLES / "model" / "simple", repository / "model" / "simple")
    (repository / "graphs").mkdir()
    engine = ("--engine", "ray", "--ray-address", job.address, "--in-process", "--repository", str(repository))
    command = _command(job.data, tmp_path / "o", *engine)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["num_rows"] == NUM_ROWS
    assert _files(tmp_path / "o") == job.files
    deadline_s = time.monotonic() + TIMEOUT_S
    while _is_served(repository):  # Ray ends its workers, and they their meshes, behind the job
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_an_address_without_a_cluster_is_refused_at_once(job: Job, tmp_path: Path) -> None:
    """Ray itself would try it for minutes."""
    engine = ("--engine", "ray", "--ray-address", "127.0.0.1:1")
    command = _command(job.data, tmp_path / "o", "--url", job.url, *engine)
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 1
    assert "UNAVAILABLE: no Ray cluster at '127.0.0.1:1'" in done.stderr
