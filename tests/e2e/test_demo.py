"""`make demo` and `make bench` on the sample models, as a user runs them."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import run

ROOT = Path(__file__).resolve().parents[2]


def test_the_demo_asks_every_sample_graph(tmp_path: Path) -> None:
    """The launcher ends with 0, each graph's answer is printed with path and times, and the mesh is stopped."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "run_demo.py")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for graph in (
        "embed",
        "triage",
        "digits",
        "digits_cascade",
        "digits_ab",
        "simple",
        "identity",
        "identity3",
        "write",
    ):
        assert f"\n{graph}: " in result.stdout
    assert "LABEL = billing" in result.stdout
    assert "by_team[shipping]" in result.stdout
    assert " ms  root/tokenize  (tokenize_minilm on preprocess)" in result.stdout
    assert " ms  to the first of " in result.stdout
    assert re.search(r"\nEvery graph answered\.\nThe mesh is stopped, after [\d.]+ s in all\.\n$", result.stdout)


@pytest.mark.long
def test_a_quick_benchmark_measures_without_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Table and JSON have a row for each load, no errors, and CPU time of the services that worked."""
    assert run.main(["--quick", "--only", "identity", "--results", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == 9  # four workloads at two concurrencies, one open loop
    assert all(row["num_answers"] == 20 and row["num_errors"] == 0 for row in rows)
    assert all(0 < row["latency_ms"]["p50"] <= row["latency_ms"]["p99"] for row in rows)
    assert set(rows[0]["cpu_s_per_1000"]) == {"router", "preprocess", "model", "postprocess", "floor", "client"}
    assert f"written to {path}" in capsys.readouterr().out
