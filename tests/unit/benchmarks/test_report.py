"""Figures as table and JSON."""

import json
import os
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
from benchmarks import machine, requests, run
from benchmarks.report import make_row, render, write_json

from weft.capacity.tuning.load import Load
from weft_protos import grpc_service_pb2 as pb

LOAD = Load(latencies_s=[0.001] * 8, errors=Counter({"UNAVAILABLE": 2}), duration_s=2.0)
MACHINE = {"cpu": "Z80", "num_cores": 1, "memory_gib": 0.1, "gpu": "none", "system": "CP/M", "python": "3.11"}


def test_cpu_time_is_for_1000_requests_failed_ones_included() -> None:
    """5 CPU-seconds for 10 requests are 500 for 1000."""
    row = make_row("w", "closed, 1 at once", LOAD, {"router": 5.0})
    assert row.cpu_s_per_1000 == {"router": 500.0}
    assert (row.num_answers, row.num_errors, row.errors) == (8, 2, {"UNAVAILABLE": 2})
    assert row.rate_per_s == 4.0
    assert row.latency_ms == {"p50": 1.0, "p90": 1.0, "p99": 1.0, "max": 1.0}


def test_the_table_has_a_line_for_each_row() -> None:
    """Hardware and versions first, then the rows; a run without answers shows dashes."""
    rows = [make_row("echo", "open, 5/s", LOAD, {"router": 1.0, "client": 2.0}), make_row("none", "-", Load(), {})]
    text = render(rows, {**MACHINE, "packages": {"grpcio": "1.85.1"}})
    assert "Z80, 1 cores, 0.1 GiB" in text
    assert "grpcio 1.85.1" in text
    header, *lines = text.splitlines()[-3:]
    assert header.split()[-2:] == ["router", "client"]
    assert lines[0].split()[:4] == ["echo", "open,", "5/s", "8"]
    assert lines[1].split() == ["none", "-", "0", "0", "0", "-", "-", "-", "0.00", "0.00"]


def test_json_holds_machine_and_rows(tmp_path: Path) -> None:
    """One file for each time, in a folder that is made."""
    row = make_row("w", "m", LOAD, {})
    path = write_json(tmp_path / "results", [row], MACHINE, now=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC))
    assert path.name == "20260102T030405Z.json"
    document = json.loads(path.read_text())
    assert document["machine"] == MACHINE
    assert document["rows"][0]["latency_ms"]["p99"] == 1.0


def test_cpu_time_of_this_process_grows_with_work() -> None:
    """What /proc says is what the process itself counts, within two clock ticks."""
    while time.process_time() < 0.1:
        pass
    before_s = time.process_time()
    counted_s = machine.cpu_seconds({"me": os.getpid()})["me"]
    assert before_s - 0.02 <= counted_s <= time.process_time() + 0.02


def test_the_machine_is_described() -> None:
    """Processor, cores and versions are known on every Linux."""
    described = machine.describe()
    assert described["cpu"]
    assert described["num_cores"] == len(os.sched_getaffinity(0))
    assert "grpcio" in described["packages"]  # type: ignore[operator]


def test_texts_have_mixed_lengths_and_are_repeatable() -> None:
    """Lengths cover 5 to 200 words; the same seed gives the same texts."""
    lengths = [len(text.split()) for text in requests.texts(500)]
    assert min(lengths) >= requests.MIN_WORDS
    assert max(lengths) <= requests.MAX_WORDS
    assert max(lengths) - min(lengths) > 150
    assert requests.texts(10) == requests.texts(10)


@pytest.mark.parametrize("workload", run.WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_sends_requests_of_the_protocol(workload: run.Workload) -> None:
    """Each payload is a `ModelInferRequest` with as many raw tensors as inputs."""
    for payload in workload.make_requests():
        request = pb.ModelInferRequest.FromString(payload)
        assert request.model_name in workload.name
        assert len(request.inputs) == len(request.raw_input_contents) > 0
