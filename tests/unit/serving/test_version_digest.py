"""What the configuration of a version says of its files."""

from pathlib import Path

import pytest

from weft.serving.lifecycle import repository as module
from weft.serving.lifecycle.repository import version_digest


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
