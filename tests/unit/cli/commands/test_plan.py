"""``weft plan`` places models: what it saves it checks, and what it prints is configuration."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.base.text.pbtxt import parse
from weft.capacity.placement.outputs import load
from weft.cli.__main__ import main
from weft_protos.model_config_pb2 import ModelConfig

CONFIG = """
name: "scorer"
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "SCORE" data_type: TYPE_FP32 dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
MODEL = "class TritonPythonModel:\n    def execute(self, requests):\n        return []\n"
FLEET = """
[[host]]
name = "a"
domain = "zone-a"
num_devices = 2
[[host]]
name = "b"
domain = "zone-b"
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """Two hosts in two zones, with two H100s and one."""
    path = tmp_path / "fleet.toml"
    path.write_text(FLEET)
    return path


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., int]:
    """The status of ``weft plan`` for a Python model with a declared need of 30 GiB and 2 ms a row."""
    folder = tmp_path / "repository" / "model" / "scorer"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "1" / "model.py").write_text(MODEL)
    given = ["plan", "scorer", "--repository", str(tmp_path / "repository"), "--device", "H100"]
    return lambda *options: main([*given, "--declare", f"scorer={30 << 10}:2", *map(str, options)])


def test_a_plan_is_saved_and_unmoved_when_checked(
    plan: Callable[..., int], tmp_path: Path, fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checked against itself it has status 0; a host that goes moves its replica, with status 1 and the cause."""
    saved = tmp_path / "plan.json"
    assert 0 == plan("--fleet", fleet, "--replicas", "scorer=2", "--save", saved)
    problem, solution = load(saved)
    assert {"a", "b"} == {{d.name: d.host for d in problem.devices}[name] for name in solution.devices}
    assert 0 == plan("--fleet", fleet, "--replicas", "scorer=2", "--check", saved)
    assert "nothing has changed" in capsys.readouterr().out
    fleet.write_text(FLEET.replace('"b"', '"c"'))
    assert 1 == plan("--fleet", fleet, "--replicas", "scorer=2", "--check", saved)
    assert (
        "moves: scorer[1] from b to c: workload 'scorer' is on device 'b', which is not there"
        in capsys.readouterr().out
    )


def test_a_higher_rate_starts_replicas(
    plan: Callable[..., int], tmp_path: Path, fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rate of more than one device's needs more replicas; they start beside what is there, as values too."""
    saved = tmp_path / "plan.json"
    assert 0 == plan("--fleet", fleet, "--rate", "scorer=100", "--save", saved)
    capsys.readouterr()
    assert 0 == plan("--fleet", fleet, "--rate", "scorer=600", "--check", saved, "--json")
    change = json.loads(capsys.readouterr().out)["change"]
    assert [None] == [entry["from"] for entry in change["changes"]]
    assert any("num_replicas 1 -> 2" in line for line in change["differences"])


def test_outputs_are_configuration(
    plan: Callable[..., int], tmp_path: Path, fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Instance groups parse as ``config.pbtxt``."""
    assert 0 == plan("--fleet", fleet, "--replicas", "scorer=2", "--instance-groups")
    groups = capsys.readouterr().out.partition("# scorer on a\n")[2].partition("# scorer on b")[0]
    config, _ = parse(groups, ModelConfig(), file="config.pbtxt")
    assert [(1, [0])] == [(group.count, list(group.gpus)) for group in config.instance_group]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--check", "missing.json"], "'missing.json': No such file"),
        (["--fleet", "missing.toml"], "'missing.toml': No such file"),
        (["--fleet", __file__], "is not TOML"),
        (["--check", __file__], "is not a saved plan"),
        (["--replicas", "other=2"], "--replicas: 'other' is none of the planned models"),
        (["--save", "/no/such/folder/plan.json"], "No such file"),
        (["--save", "/"], "'/' is a folder; name a file"),
    ],
)
def test_what_cannot_be_done_is_told(
    plan: Callable[..., int], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file or model that is not there, or no such file, is one line and status 1."""
    assert 1 == plan(*options)
    assert message in capsys.readouterr().err


def test_what_does_not_fit_has_status_1(
    plan: Callable[..., int], fleet: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More replicas than the zones hold: the text says which rule cannot be kept."""
    assert 1 == plan("--fleet", fleet, "--replicas", "scorer=6")
    assert "'zone-b' has room for 2, were it empty" in capsys.readouterr().out
