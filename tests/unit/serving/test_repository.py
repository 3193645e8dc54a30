"""Which folders are models and versions, and which names never reach the disk."""

from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.serving.lifecycle.repository import ModelRepository, check_name


def test_names_are_the_visible_folders(tmp_path: Path) -> None:
    """Every folder is a model, except hidden ones and Python's cache; files are none."""
    for folder in ("beta", "alpha", "with.dot", ".git", "__pycache__"):
        (tmp_path / folder).mkdir()
    (tmp_path / "README.md").touch()
    assert ModelRepository(tmp_path).names() == ["alpha", "beta", "with.dot"]


def test_versions_are_the_numeric_folders(tmp_path: Path) -> None:
    """A version is a folder whose name is a whole number of at least 1, without leading zeros; order is by number."""
    for folder in ("10", "9", "0", "01", "-1", "1.5", "latest", "٣"):  # a digit that is not ASCII
        (tmp_path / "m" / folder).mkdir(parents=True)
    (tmp_path / "m" / "7").touch()
    assert ModelRepository(tmp_path).versions("m") == [9, 10]


def test_unknown_model(tmp_path: Path) -> None:
    """A folder that is not there, and a file, are no models."""
    (tmp_path / "file").touch()
    for name in ("absent", "file"):
        with pytest.raises(NotFoundError, match=f"the repository has no folder '{name}'"):
            ModelRepository(tmp_path).directory(name)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../outside",
        "a/b",
        "/etc",
        "a\\b",
        "..\\outside",
        ".hidden",
        "a\0b",
        "a\nb",
        "x" * 256,
        "é" * 128,
    ],
)
def test_name_that_could_leave_the_repository(tmp_path: Path, name: str) -> None:
    """A name that is not one plain path component is refused before the disk is asked."""
    (tmp_path / "outside").mkdir()
    with pytest.raises(InvalidArgumentError, match="Invalid model name"):
        ModelRepository(tmp_path / "repository").directory(name)


@pytest.mark.parametrize("name", ["m", "with.dot", "a..b", "mit leerzeichen", "Modell-ß", "x" * 255])
def test_plain_name(name: str) -> None:
    """Dots inside, spaces and letters of any script are fine."""
    check_name(name)


def test_ensembles_belong_to_the_router(tmp_path: Path) -> None:
    """A folder whose configuration declares an ensemble is no model, also where the file has faults."""
    for name, config in (
        ("model", 'backend: "python"'),
        ("ensemble", 'platform: "ensemble" ensemble_scheduling { }'),
        ("bad", "platform: 'ensemble' nonsense {"),
        ("empty", ""),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.pbtxt").write_text(config)
    (tmp_path / "without").mkdir()
    assert ModelRepository(tmp_path).names() == ["empty", "model", "without"]


def test_graphs_beside_models_belong_to_the_router(tmp_path: Path) -> None:
    """A folder with a ``graph.pbtxt`` is no model that lacks its configuration."""
    for name in ("m/1/model.onnx", "g/1/graph.pbtxt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert ["m"] == ModelRepository(tmp_path).names()
