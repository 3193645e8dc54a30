"""``weft train-heads``: heads from a folder and a text, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError
from tests.unit.llm.permutation_model import permutation
from tests.unit.llm.speculation.folders import CONFIG, write_model

from weft.cli.__main__ import main
from weft.llm.speculation import medusa


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose text is a known permutation, and 1,280 tokens of such text in ``ids.npy``."""
    model = write_model(tmp_path / "model")
    following, tokens = permutation(CONFIG["vocab_size"], 1), [0]
    for _ in range(1279):
        tokens.append(int(following[tokens[-1]]))
    np.save(model / "ids.npy", np.array(tokens))
    return model


def train(folder: Path, *more: str, data: str = "ids.npy") -> int:
    """Exit status of a short training."""
    arguments = ["--data", str(folder / data), "-o", str(folder / "heads"), "--num-steps", "300", "--num-heads", "2"]
    return main(["train-heads", str(folder), *arguments, *more])


def test_heads_of_a_predictable_model_are_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On text that the model knows by heart each head names the next token, and the report says so of held-out text."""
    assert train(folder, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["top_1"] for row in report["heads"]] == [1.0, 1.0]
    assert all(row["top_3"] == row["top_5"] == row["agreement"] == 1.0 for row in report["heads"])
    described = json.loads((folder / "heads" / "medusa_heads.json").read_text())
    assert described["held_out"] == report["heads"]
    assert described["num_heads"] == 2


def test_a_table_names_each_head(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --json there is a line for each head, and one with the folder."""
    assert train(folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:3]] == [["1", "100.0%"], ["2", "100.0%"]]
    assert lines[3] == f"wrote {folder / 'heads'}, trained on 1280 tokens"


def test_existing_heads_are_kept(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second training refuses before it begins, unless it is forced."""
    (folder / "heads").mkdir()
    (folder / "heads" / "medusa_heads.json").write_text("mine")
    assert train(folder) == 1
    assert "--force writes over it" in capsys.readouterr().err
    assert (folder / "heads" / "medusa_heads.json").read_text() == "mine"
    assert train(folder, "--force") == 0


def test_a_huge_text_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A text that takes more memory than the model is not read."""
    with (folder / "huge.txt").open("wb") as huge:
        huge.truncate(2**40)  # takes no space
    assert train(folder, data="huge.txt") == 1
    assert "must have at most 67108864 bytes, got 1099511627776; give a part" in capsys.readouterr().err


def test_heads_that_cannot_be_written_leave_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full at the end is told, and no half of the heads stays."""

    def fail(weights: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(medusa, "save_file", fail)
    assert train(folder, "--num-steps", "1") == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [] == list((folder / "heads").iterdir())


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("none.txt", None, "no file "),
        ("text.txt", b"some text", "no tokenizer in "),
        ("few.npy", np.arange(20) % 32, "must have at least 128 tokens"),
        ("empty.npy", np.zeros(0, np.int64), "must have at least 128 tokens"),
        ("large.npy", np.arange(200), "token ids of this model are 0 to 31, got 32 at index 32"),
        ("float.npy", np.zeros(200), "must have a 1-D array of token ids, got float64 [200]"),
        ("square.npy", np.zeros((20, 20), np.int64), "got int64 [20, 20]"),
        ("torn.npy", b"\x93NUMPY", "is no array of numpy"),
    ],
)
def test_wrong_data_is_refused(
    folder: Path, name: str, content: Any, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 1 and one line that says what is wrong; no heads are written."""
    if isinstance(content, bytes):
        (folder / name).write_bytes(content)
    elif content is not None:
        np.save(folder / name, content)
    assert train(folder, data=name) == 1
    told = capsys.readouterr().err
    assert problem in told
    assert len(told.splitlines()) == 1
    assert not (folder / "heads").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), "no file with weights"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
        (lambda folder: (folder / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 64})), "shape"),
    ],
    ids=["no weights", "no config", "another config"],
)
def test_a_wrong_folder_is_refused(folder: Path, change, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be served cannot be trained on, with the message of loading."""
    change(folder)
    assert train(folder) == 1
    assert problem in capsys.readouterr().err
    assert not (folder / "heads").exists()


def test_wrong_numbers_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More heads than allowed, and a device that is not there."""
    assert train(folder, "--num-heads", "17") == 1
    assert "num_heads must be from 1 to 16, got 17" in capsys.readouterr().err
