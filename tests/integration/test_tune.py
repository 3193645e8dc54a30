"""``weft tune`` end to end: real meshes from staged repositories, a study that goes on, and what it writes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weft.tools.check import check, find_files

pytestmark = pytest.mark.long

TIMEOUT_S = 240
#: A latency that no machine misses, and runs of as few requests as there can be.
QUICK = ("--slo", "p50=15s", "--concurrency", "4", "--run-s", "0.1", "--confirm-rounds", "1", "--json")


@pytest.fixture(scope="module")
def small(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with `simple` alone."""
    root = tmp_path_factory.mktemp("tune") / "repository"
    (root / "graphs").mkdir(parents=True)
    (root / "model" / "simple").mkdir(parents=True)
    for entry in (repository / "model" / "simple").iterdir():
        target = root / "model" / "simple" / entry.name
        if entry.is_dir():
            target.symlink_to(entry.resolve())
        else:
            target.write_bytes(entry.read_bytes())
    return root


def command(small: Path, study: Path, *arguments: str) -> list[str]:
    """The command over the small repository."""
    return [
        sys.executable, "-P", "-m", "weft.cli", "tune", "simple", "--repository", str(small), "--study", str(study),
        *QUICK, *arguments,
    ]  # fmt: skip


def files(folder: Path) -> dict[str, bytes]:
    """Content of each file."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_trials_interrupted_and_resumed_end_in_a_copy_that_serves(small: Path, tmp_path: Path) -> None:
    """Ctrl-C after the first trial keeps it; --resume goes on behind it; the repository itself stays as it is.

    The pick of so few requests is anything: what it says is in the copy, which `weft check` finds nothing wrong with.
    """
    before, study, output = files(small), tmp_path / "study", tmp_path / "tuned"
    with subprocess.Popen(
        command(small, study, "--trials", "50"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()  # a trial has ended
        assert "shipped" in line, line + process.stderr.read()
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130, told
    assert "--resume goes on" in told
    assert files(small) == before

    again = subprocess.run(
        command(small, study, "--trials", "50"), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert again.returncode == 1
    assert "has a study already; --resume goes on with it" in again.stderr

    done = subprocess.run(
        command(small, study, "--trials", "2", "--resume", "--output", str(output)),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["trials"][0]["outcome"] == "shipped"
    assert len(facts["trials"]) == 2
    assert facts["trials"][1]["changes"] == {"in_process": {"from": "none", "to": "model"}}
    assert 0 in facts["pareto"] or 1 in facts["pareto"]
    assert facts["trials"][0]["values"]["cpu"] > 0
    assert facts == json.loads((study / "report.json").read_text())
    assert files(small) == before
    assert files(output).keys() == files(small).keys() | {"model/simple/1/model.onnx"}
    assert not check(find_files([output]), None)
