"""Graph files in a repository: which versions are served."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.router.repository.files import GraphRepository


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


@pytest.mark.parametrize("config", [None, "", "max_batch_size: 4"])
def test_a_model_without_a_whole_configuration_is_no_graph(tmp_path: Path, config: str | None) -> None:
    """Its files say what it is, and it is no faulty graph either."""
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    if config is not None:
        (tmp_path / "m" / "config.pbtxt").write_text(config)
    repository = GraphRepository(tmp_path)
    assert ({}, {}) == (repository.scan(), repository.faults)


def test_a_model_beside_an_ensemble_is_no_graph(tmp_path: Path) -> None:
    """In a repository of Triton Inference Server models and ensembles stand side by side."""
    for name, text in (("m", 'name: "m"\nbackend: "python"'), ("e", 'platform: "ensemble"')):
        (tmp_path / name / "1").mkdir(parents=True)
        touch(tmp_path, f"{name}/config.pbtxt", text=text)
    assert {"e": ["1"]} == versions(tmp_path)


def shut(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Nobody may look into a folder: the tests may run as root, who may."""
    stat, iterdir = Path.stat, Path.iterdir

    def check(path: Path) -> None:
        if folder in path.parents:
            raise PermissionError(errno.EACCES, "Permission denied")

    def guarded_stat(path: Path, **options: bool) -> os.stat_result:
        check(path)
        return stat(path, **options)

    def guarded_iterdir(path: Path) -> Iterator[Path]:
        check(path / "any")
        return iterdir(path)

    monkeypatch.setattr(Path, "stat", guarded_stat)
    monkeypatch.setattr(Path, "iterdir", guarded_iterdir)


def test_a_folder_that_cannot_be_a_graph_does_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A name no message can carry, a folder that may not be read, an ensemble without version: each is told once."""
    touch(tmp_path, "good/1/graph.pbtxt", "shut/1/graph.pbtxt", "e/config.pbtxt")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/odd\xff/1")).mkdir(parents=True)
    shut(monkeypatch, tmp_path / "shut")
    repository = GraphRepository(tmp_path)
    assert ["good"] == list(repository.scan())
    assert ["good"] == list(repository.scan())
    assert {
        "e": "it has no version folder; make an empty folder '1' beside config.pbtxt",
        "odd\\udcff": "its name is not UTF-8",
        "shut": "it cannot be read: Permission denied",
    } == repository.faults
    assert {"shut"} == repository.unreadable
    assert [f"graph folder '{name}': {fault}" for name, fault in repository.faults.items()] == caplog.messages


def test_what_is_wrong_with_a_version_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are none, a folder that may not be read, a link to nothing, a folder in place of the file."""
    touch(
        tmp_path, *(f"a/{name}/graph.pbtxt" for name in ("0", "01", "1", "2", "²", "٣", "v4", "9" * 30)), "a/latest/x"
    )
    (tmp_path / "a/5/graph.pbtxt").mkdir(parents=True)
    (tmp_path / "a/6").mkdir()
    (tmp_path / "a/6/graph.pbtxt").symlink_to("nowhere")
    (tmp_path / "a/7").symlink_to("1")
    (tmp_path / "a/8").symlink_to("8")
    shut(monkeypatch, tmp_path / "a/2")
    repository = GraphRepository(tmp_path)
    assert {"a": ["1", "7"]} == {name: [file.version for file in files] for name, files in repository.scan().items()}
    why = "the folder is no version, which is a whole number from 1 without leading zeros"
    assert [
        *(f"'{name}/graph.pbtxt': {why}" for name in ("0", "01")),
        "'2/graph.pbtxt' cannot be read: Permission denied",
        "'5/graph.pbtxt' is no regular file",
        "'6/graph.pbtxt' is a link that leads nowhere",
        *(f"'{name}/graph.pbtxt': {why}" for name in ("9" * 30, "v4", "²", "٣")),
    ] == repository.faults["a"].split("; ")
    assert {"a"} == repository.unreadable


def test_a_change_is_seen_whatever_time_the_file_shows(tmp_path: Path) -> None:
    """Of the same length, written in place, with the old time put back, or an older one."""
    touch(tmp_path, "a/1/graph.pbtxt", text="one")
    path, repository = tmp_path / "a/1/graph.pbtxt", GraphRepository(tmp_path)
    stamps = {repository.scan()["a"][0].stamp}
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    for text, ns in (("two", times), ("six", (0, 0))):
        while (changed := path.stat().st_ctime_ns) in {stamp[0] for stamp in stamps}:
            path.write_text(text)  # until the clock of the file system has moved on
            os.utime(path, ns=ns)
        assert changed not in {stamp[0] for stamp in stamps}
        stamps.add(repository.scan()["a"][0].stamp)
    assert 3 == len(stamps)


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
