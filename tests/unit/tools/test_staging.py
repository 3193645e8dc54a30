"""Repositories made of links."""

from pathlib import Path

import pytest

from weft.tools.offline import stage


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two models and a graph."""
    root = tmp_path / "repository"
    for name in ("model/m/1/model.onnx", "model/m/2/model.onnx", "model/m/labels.txt", "model/m/.hidden"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    for name in ("model/m/config.pbtxt", "model/other/config.pbtxt", "graphs/g/1/graph.pbtxt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name)
    return root


def files(root: Path) -> dict[str, str]:
    """Text by name, through links."""
    return {str(path.relative_to(root)): path.read_text() for path in root.glob("*/*/**/*") if path.is_file()} | {
        f"{path.relative_to(root)}/{inner.name}": inner.read_text()
        for path in root.glob("*/*/*")
        if path.is_dir()
        for inner in path.iterdir()
    }


def test_a_stage_has_what_is_named_and_what_is_put_in_its_place(repository: Path, tmp_path: Path) -> None:
    """Text, links, and nothing; all other entries of the folders are links, without hidden ones."""
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "model.onnx").write_text("new")
    own = Path("model/m")
    replaced: dict[Path, str | Path | None] = {
        own / "1": tmp_path / "new", own / "2": None, own / "config.pbtxt": "changed",
    }  # fmt: skip
    staged = stage(repository, [own, own, Path("graphs/g")], replaced, tmp_path / "staged")
    assert files(staged) == {
        "model/m/1/model.onnx": "new",
        "model/m/config.pbtxt": "changed",
        "model/m/labels.txt": "model/m/labels.txt",
        "graphs/g/1/graph.pbtxt": "graphs/g/1/graph.pbtxt",
    }


def test_a_stage_is_made_anew_and_its_source_stays(repository: Path, tmp_path: Path) -> None:
    """What was there goes, links and not what they lead to."""
    before = files(repository)
    for name in ("m", "other"):
        staged = stage(repository, [Path("model", name)], {}, tmp_path / "staged")
        assert [path.name for path in (staged / "model").iterdir()] == [name]
        assert (staged / "graphs").is_dir()
    assert files(repository) == before
