"""`weft init`: a repository that works as it is."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from weft.backends.postprocess import BACKENDS
from weft.base.core import CallContext, InferCall
from weft.base.tensors import decode, encode
from weft.cli.__main__ import main
from weft.cli.commands.init import FILES, write_starter
from weft.serving.core import ServingCore


def test_what_init_writes_has_no_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`check` finds nothing, `explain` finds the graph's calls, and each command that the README names is there."""
    assert main(["init", str(tmp_path / "mine")]) == 0
    assert [str(tmp_path / "mine" / name) for name in FILES] == capsys.readouterr().out.splitlines()
    assert main(["check", str(tmp_path / "mine"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    graph = str(tmp_path / "mine/graphs/quadruple/1/graph.pbtxt")
    assert main(["explain", graph, "--input", "X=[3]"]) == 0
    assert "calls at most: 2" in capsys.readouterr().out
    named = re.findall(r"^    weft (\w+)", FILES["README.md"], re.MULTILINE)
    assert ["check", "up", "infer", "explain"] == named


@pytest.mark.parametrize("taken", ["folder", "file"])
def test_a_folder_with_files_is_left_alone(tmp_path: Path, taken: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is written over; an empty folder is taken."""
    mine = tmp_path / "mine"
    if taken == "folder":
        mine.mkdir()
        (mine / "notes").touch()
    else:
        mine.touch()
    assert main(["init", str(mine)]) == 1
    assert "weft: ALREADY_EXISTS: " in capsys.readouterr().err
    assert not (mine / "graphs").exists()
    (tmp_path / "empty").mkdir()
    assert len(FILES) == len(write_starter(tmp_path / "empty"))


async def test_the_model_of_init_doubles(tmp_path: Path) -> None:
    """By a backend that needs none of the packages of the extras."""
    write_starter(tmp_path)
    core = ServingCore(tmp_path / "model", BACKENDS, num_gpus=0)
    await core.start()
    try:
        result = await core.infer(InferCall("double", inputs={"X": encode(np.array([[3]], np.float32))}), CallContext())
    finally:
        await core.close(grace_s=5)
    assert [[6.0]] == decode(result.outputs["Y"]).tolist()
