"""Which folders are models and versions, and which names never reach the disk."""

import json
import threading
from pathlib import Path

import pytest

from weft.base.errors import InvalidArgumentError, NotFoundError
from weft.serving.backends import loading
from weft.serving.lifecycle import repository as module
from weft.serving.lifecycle.repository import ModelRepository, check_name, version_digest


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


def _folder(root: Path, **files: bytes) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_names_and_content_count(tmp_path: Path) -> None:
    """Two copies are equal whenever they were written; another byte, name or border between two files is another."""
    files = {"a": b"weights", "sub/b": b"more"}
    first = version_digest(_folder(tmp_path / "1", **files))
    assert version_digest(_folder(tmp_path / "2", **files)) == first
    others = [
        files | {"a": b"weightz"},
        {"a": b"weights", "b": b"more"},
        {"a": b"weightsm", "sub/b": b"ore"},
        files | {"c": b""},
        {},
    ]
    digests = {version_digest(_folder(tmp_path / f"other{number}", **each)) for number, each in enumerate(others)}
    assert len(digests | {first}) == len(others) + 1


def test_what_is_no_part_of_the_version_does_not_count(tmp_path: Path) -> None:
    """Compiled Python, hidden files, links to nothing, and files that vanish."""
    first = version_digest(_folder(tmp_path, a=b"weights"))
    _folder(tmp_path, **{"__pycache__/model.pyc": b"x", ".cache/y": b"y", ".z": b"z"})
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert version_digest(tmp_path) == first
    assert version_digest(tmp_path / "nothing") == version_digest(_folder(tmp_path / "empty/x"))


@pytest.mark.parametrize("place", [0, 5_000, 9_999])
def test_large_files_count_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Begin, end and what is between: weights that differ everywhere differ in what is read."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 10)
    monkeypatch.setattr(module, "_NUM_PIECES", 5)
    content = bytearray(10_000)
    first = version_digest(_folder(tmp_path, a=bytes(content)))
    content[max(place - 3_000, 0) : place + 3_000] = b"\1" * len(content[max(place - 3_000, 0) : place + 3_000])
    assert version_digest(_folder(tmp_path, a=bytes(content))) != first
    assert version_digest(_folder(tmp_path, a=bytes(10_001))) != first


@pytest.fixture
def other_import():
    """A thread that imports until the test ends, and is importing now."""
    has_begun, may_end = threading.Event(), threading.Event()

    def run():
        with loading.importing():
            has_begun.set()
            may_end.wait(10)

    thread = threading.Thread(target=run)
    thread.start()
    assert has_begun.wait(10)
    yield thread
    may_end.set()
    thread.join()


def test_one_load_imports_at_a_time(other_import):
    """While one load imports, another one cannot begin to."""
    assert not loading._import_lock.acquire(timeout=0)


def test_an_import_that_hangs_holds_up_nobody_for_ever(other_import, monkeypatch):
    """After a while a load imports beside one that does not come to its end."""
    monkeypatch.setattr(loading, "IMPORT_WAIT_S", 0.01)
    assert json is loading.require("json", "none")
    assert other_import.is_alive()
