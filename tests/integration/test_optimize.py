"""``weft optimize`` from the data to the new version, over a real mesh and a real ONNX model."""

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from weft.cli.__main__ import main
from weft.optimize import cost, optimize
from weft.optimize.cost import CostMeter, VersionCost, VersionProcess
from weft.optimize.methods.int8 import INT8_DYNAMIC
from weft.optimize.methods.method import Built, Inputs, SourceModel

pytestmark = pytest.mark.long

WIDTH = 256
SIZES = {"X": 32, "Y": 8}
#: A model, but for its file, and a graph that calls it by other names.
FILES = Path(__file__).with_name("data") / "optimize"
TIMEOUT_S = 240


def write_model(path: Path, last: float = 1.0) -> None:
    """Three layers of random weights, those of the last scaled."""
    random = np.random.default_rng(0)
    sizes = [32, WIDTH, WIDTH, 8]
    nodes, weights = [], []
    for layer, (rows, columns) in enumerate(pairwise(sizes)):
        values = random.standard_normal((rows, columns)) / np.sqrt(rows) * (last if layer == 2 else 1.0)
        weights.append(numpy_helper.from_array(values.astype(np.float32), f"w{layer}"))
        product = "Y" if layer == 2 else f"p{layer}"
        nodes.append(helper.make_node("MatMul", ["X" if layer == 0 else f"a{layer - 1}", f"w{layer}"], [product]))
        if layer < 2:
            nodes.append(helper.make_node("Relu", [product], [f"a{layer}"]))
    tensors = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", size]) for n, size in (("X", 32), ("Y", 8))
    ]
    graph = helper.make_graph(nodes, "wide", tensors[:1], tensors[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


class Spoiled:
    """Writes a model of another mind."""

    name = "spoiled"

    def unsuitable(self, source: SourceModel) -> str:
        """Never."""
        return ""

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """The answers have the opposite sign; what calibrates is what the model sees."""
        assert {"X"} == set(calibration[0])
        assert (1, 32) == calibration[0]["X"].shape
        write_model(folder / source.file.name, last=-1.0)
        return Built({}, "signs turned")


class Unsuitable(Spoiled):
    """Builds nothing."""

    def unsuitable(self, source: SourceModel) -> str:
        """Always."""
        return "not today"


class Garbage(Spoiled):
    """Writes what is no model."""

    name = "garbage"

    def build(self, source: SourceModel, calibration: Sequence[Inputs], folder: Path) -> Built:
        """Some bytes."""
        (folder / source.file.name).write_bytes(b"garbage")
        return Built({}, "")


class HalfTheTime(CostMeter):
    """Measures in earnest, and says of each candidate that it took half of the original's time."""

    def measure(self, candidate: VersionProcess) -> tuple[dict[int, VersionCost], dict[int, VersionCost]]:
        """What is measured depends on the machine, and so do the ratios that decide."""
        original, costs = super().measure(candidate)
        return original, {rows: one._replace(time_ratio=0.5, busy_time_ratio=0.5) for rows, one in costs.items()}


@pytest.fixture(autouse=True)
def few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each round of a measurement is short."""
    monkeypatch.setattr(cost, "_ROUND_CPU_S", 0.05)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A model, and a graph that calls it by other names."""
    folder = tmp_path / "repository"
    shutil.copytree(FILES, folder)
    (folder / "model/wide/1").mkdir()
    write_model(folder / "model/wide/1/model.onnx")
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Rows for the graph."""
    path = tmp_path / "data.jsonl"
    values = np.random.default_rng(1).standard_normal((64, 32)).round(3).tolist()
    path.write_text("".join(json.dumps({"VALUES": row}) + "\n" for row in values))
    return path


def state(folder: Path) -> dict[str, bytes]:
    """Every file, hidden ones too."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_best_candidate_that_passes_becomes_a_version(
    repository: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that answers otherwise is refused, one that cannot be loaded has failed; the report says all of it."""
    methods = {method.name: method for method in (Spoiled(), Garbage(), INT8_DYNAMIC)}
    monkeypatch.setattr(optimize, "METHODS", methods)
    monkeypatch.setattr(optimize, "CostMeter", HalfTheTime)
    before = state(repository)
    command = ["optimize", "wide", "--data", str(data), "--max-loss", "1%", "--repository", str(repository)]
    assert 0 == main([*command, "--rounds", "1", "--report", str(tmp_path / "report"), "--json"])
    facts = json.loads(capsys.readouterr().out)
    spoiled, garbage, int8 = facts["candidates"]
    assert ("refused", "it loses 200.00%, 1.00% is allowed") == (spoiled["state"], spoiled["reason"])
    assert "failed" == garbage["state"]
    assert "cannot be loaded" in garbage["reason"]
    assert ("passes", 48) == (int8["state"], int8["loss"]["num_rows"])
    assert 0 < int8["loss"]["value"] <= int8["loss"]["high"] < 0.01
    assert ("score/1", "cosine", 16) == (facts["graph"], facts["metric"], facts["num_calibration_rows"])
    assert ("int8-dynamic", 2) == (facts["picked"], facts["written"])
    assert {"1", "16"} == set(int8["costs"])
    assert all(0 < one["p50_ms"] <= one["p99_ms"] for one in int8["costs"].values())

    after = state(repository)
    assert {"model/wide/2/model.onnx"} == after.keys() - before.keys()
    assert {"model/wide/config.pbtxt"} == {name for name in before if after[name] != before[name]}
    assert len(after["model/wide/2/model.onnx"]) < 0.3 * len(after["model/wide/1/model.onnx"])
    assert after["model/wide/config.pbtxt"].startswith(before["model/wide/config.pbtxt"])
    assert 0 == main(["check", str(repository)])
    assert facts == json.loads((tmp_path / "report/report.json").read_text())
    assert "int8-dynamic" in (tmp_path / "report/report.svg").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["wide", "--objective", "size"], "argument --objective: invalid choice"),
        (["wide", "--method", "int7"], "unknown --method 'int7'"),
        (["none"], "has no model 'none'"),
        (["wide", "--graph", "other"], "no graph of"),
        (["wide", "--report", "{data}"], "is no folder"),
    ],
)
def test_a_wrong_call_is_status_2(
    repository: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    """Nothing is tried."""
    call = ["optimize", *arguments, "--data", str(data), "--max-loss", "1%", "--repository", str(repository)]
    try:
        found = main([one.format(data=data) for one in call])
    except SystemExit as end:
        found = end.code
    assert 2 == found
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("end", ["unsuitable", "failed"])
def test_nothing_better_is_status_3_and_a_run_that_fails_is_status_1(
    repository: Path, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    """No candidate passes; or the original itself cannot be served."""
    monkeypatch.setattr(optimize, "METHODS", {"unsuitable": Unsuitable()})
    if end == "failed":
        (repository / "model/wide/1/model.onnx").write_bytes(b"garbage")
    before = state(repository)
    call = ["optimize", "wide", "--data", str(data), "--max-loss", "1%", "--repository", str(repository)]
    assert {"unsuitable": 3, "failed": 1}[end] == main([*call, "--rounds", "1"])
    assert before == state(repository)
    assert ("no candidate passes the gate" in capsys.readouterr().out) is (end == "unsuitable")


def test_a_run_that_is_told_to_end_leaves_nothing(repository: Path, data: Path, tmp_path: Path) -> None:
    """While a mesh starts."""
    before, report = state(repository), tmp_path / "report"
    command = [sys.executable, "-P", "-m", "weft.cli", "optimize", "wide", "--data", str(data), "--max-loss", "1%"]
    with subprocess.Popen(
        [*command, "--repository", str(repository), "--report", str(report)], stderr=subprocess.PIPE, text=True
    ) as run:
        follower = subprocess.Popen(
            ["tail", "-F", "-n", "+1", str(report / "mesh.log")], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert follower.stdout.readline()  # the first service logs
        follower.kill()
        follower.communicate()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=TIMEOUT_S)
    assert 128 + signal.SIGTERM == run.returncode
    assert before == state(repository)
    assert not [path for path in repository.rglob(".*") if path.name != ".gitkeep"]
