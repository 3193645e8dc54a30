"""A new version in a repository, whole or not at all."""

import os
from pathlib import Path

import pytest

from weft.base.errors import AlreadyExistsError, PermissionDeniedError, UnavailableError
from weft.optimize.publishing import check_publishable, held_model, publish
from weft.serving.lifecycle.repository import ModelRepository


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of one version."""
    folder = tmp_path / "repository" / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"old")
    (folder / "config.pbtxt").write_text("old")
    (folder / "config.pbtxt").chmod(0o640)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files of a version."""
    folder = tmp_path / "files"
    (folder / "inner").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(b"new")
    (folder / "inner" / "labels.txt").write_text("a")
    folder.chmod(0o700)
    return folder


def state(folder: Path) -> dict[str, bytes]:
    """Every file below the repository."""
    root = folder.parent
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def test_a_version_appears_beside_the_others(model: Path, files: Path) -> None:
    """With its folder's access rights as theirs, and the new configuration with its own; nothing else is left."""
    publish(model, 2, files, "new")
    assert {
        "m/1/model.onnx": b"old",
        "m/2/model.onnx": b"new",
        "m/2/inner/labels.txt": b"a",
        "m/config.pbtxt": b"new",
    } == state(model)
    assert (model / "1").stat().st_mode == (model / "2").stat().st_mode
    assert 0o640 == (model / "config.pbtxt").stat().st_mode & 0o777


@pytest.mark.parametrize("name", [".", "m", "../configs"])
def test_what_cannot_be_written_is_told_before_work_begins(
    model: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The folder of the models, the model's, and that of its configuration; with the way to go on without."""
    (configs := model.parent.parent / "configs").mkdir()
    (model / "config.pbtxt").rename(configs / "config.pbtxt")
    (model / "config.pbtxt").symlink_to(configs / "config.pbtxt")
    check_publishable(model)
    locked = (model.parent / name).resolve()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != locked)  # root may write anything
    with pytest.raises(PermissionDeniedError, match=f"'{locked}' cannot be written; --dry-run"):
        check_publishable(model)


def test_a_version_is_never_written_over(model: Path, files: Path) -> None:
    """Nor is a file of its name."""
    before = state(model)
    with pytest.raises(AlreadyExistsError, match="has a version 1 already; nothing was written"):
        publish(model, 1, files, "new")
    assert before == state(model)


@pytest.mark.parametrize("step", ["copytree", "replace", "rename", "fsync"])
def test_a_step_that_fails_leaves_the_model_as_it_was(
    model: Path, files: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk, or a folder that cannot be written, at any step."""
    before = state(model)

    def fail(*arguments: object, **_: object) -> None:
        raise OSError(28, "No space left on device")

    owner = {"copytree": "shutil.copytree", "replace": "pathlib.Path.replace", "rename": "pathlib.Path.rename"}
    monkeypatch.setattr(owner.get(step, "os.fsync"), fail)
    with pytest.raises(OSError, match="No space left"):
        publish(model, 2, files, "new")
    monkeypatch.undo()
    assert before == state(model)


def test_one_run_at_a_time_holds_a_model(model: Path) -> None:
    """The second is told to wait; afterwards it may."""
    with (
        held_model(model),
        pytest.raises(UnavailableError, match="another"),
        held_model(model),
    ):
        pass
    with held_model(model):
        pass


def test_what_a_killed_run_left_is_removed(model: Path) -> None:
    """Hidden folders of this model, and no other's."""
    for name in (".m.version.2", ".mine.version.2", ".m.version.x"):
        (model.parent / name).mkdir()
    with held_model(model):
        assert [".m.version.x", ".mine.version.2", "m"] == sorted(os.listdir(model.parent))


def test_a_service_that_follows_the_repository_sees_no_half_of_it(
    model: Path, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the folder has its name there is no version 2, and no model of the hidden name; the note is there."""
    repository = ModelRepository(model.parent)
    seen = []
    rename = Path.rename

    def look(path: Path, target: Path) -> Path:
        seen.append((repository.names(), repository.versions("m"), (model / "config.pbtxt").read_text()))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", look)
    publish(model, 2, files, "new")
    assert [(["m"], [1], "new")] == seen
    assert [1, 2] == repository.versions("m")


def test_a_configuration_that_is_a_link_stays_one(model: Path, files: Path, tmp_path: Path) -> None:
    """What it points to gets the note."""
    real = tmp_path / "real.pbtxt"
    (model / "config.pbtxt").rename(real)
    (model / "config.pbtxt").symlink_to(real)
    publish(model, 2, files, "new")
    assert (model / "config.pbtxt").is_symlink()
    assert "new" == real.read_text()
