"""Graph files in a repository: which versions are served."""

import errno
import os
from pathlib import Path

import pytest

from weft_router.graphs import GraphRepository


def touch(root: Path, *paths: str, text: str = "") -> None:
    for path in paths:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def versions(root: Path) -> dict[str, list[str]]:
    return {name: [file.version for file in files] for name, files in GraphRepository(root).scan().items()}


def test_every_version_with_a_graph_file_is_served(tmp_path: Path) -> None:
    """Versions are ordered as numbers; other folders and files are left out."""
    touch(tmp_path, "a/1/graph.pbtxt", "a/10/graph.pbtxt", "a/9/graph.pbtxt", "a/x/graph.pbtxt", "a/2/notes.txt")
    touch(tmp_path, "b/readme.md", ".hidden/1/graph.pbtxt", "file")
    assert {"a": ["1", "9", "10"]} == versions(tmp_path)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["9", "10"]),
        ("version_policy { all { } }", ["1", "9", "10"]),
        ("version_policy { specific { versions: [ 1, 9, 77 ] } }", ["1", "9"]),
        ("version_policy { nonsense }", ["10"]),
    ],
)
def test_of_a_triton_ensemble_the_policy_says_which(tmp_path: Path, policy: str, expected: list[str]) -> None:
    """The default is the latest; a file that cannot be read is left to the compiler to report."""
    for version in ("1", "9", "10"):
        (tmp_path / "e" / version).mkdir(parents=True)
    touch(tmp_path, "e/config.pbtxt", text=f'platform: "ensemble" {policy}')
    assert {"e": expected} == versions(tmp_path)


def test_an_ensemble_without_a_version_folder_is_not_served(tmp_path: Path) -> None:
    """As Triton Inference Server has it."""
    touch(tmp_path, "e/config.pbtxt")
    assert {} == versions(tmp_path)


def test_only_a_plain_number_is_a_version(tmp_path: Path) -> None:
    """As Triton Inference Server has it: no leading zero, no other digits of Unicode, none past 64 bits."""
    touch(tmp_path, *(f"a/{name}/graph.pbtxt" for name in ("0", "01", "1", "²", "\u0661", "9" * 30)))
    assert {"a": ["1"]} == versions(tmp_path)


def test_a_folder_that_cannot_be_a_graph_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name no message can carry, a folder that may not be read, an ensemble without version: each is told once."""
    touch(tmp_path, "good/1/graph.pbtxt", "shut/1/graph.pbtxt", "e/config.pbtxt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff/1")).mkdir(parents=True)
    iterdir = Path.iterdir

    def guarded(folder: Path) -> object:
        if folder.name == "shut":
            raise PermissionError(errno.EACCES, "Permission denied")
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", guarded)
    repository = GraphRepository(tmp_path)
    assert ["good"] == list(repository.scan())
    assert ["good"] == list(repository.scan())
    ensemble, odd, shut = (record.message for record in caplog.records)
    assert "odd\\udcff' is left out: its name is not UTF-8" in odd
    assert "shut' is left out: it cannot be read: Permission denied" in shut
    assert "e' is left out: it has no version folder; make an empty folder '1'" in ensemble


def test_a_graph_is_found_by_name_and_version(tmp_path: Path) -> None:
    """No version means the latest; a path is no name."""
    touch(tmp_path, "a/1/graph.pbtxt", text="one")
    touch(tmp_path, "a/2/graph.pbtxt", text="two")
    repository = GraphRepository(tmp_path)
    assert b"two" == repository.find("a", "").text
    assert ("a", "1", b"one") == (
        (found := repository.find("a", "1")).name,
        found.version,
        found.text,
    )
    assert [None, None] == [repository.find("../a", "1"), repository.find("a", "3")]
    assert ["a"] == repository.names()
