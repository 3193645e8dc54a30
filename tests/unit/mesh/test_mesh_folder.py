"""The folder of a mesh, with owners that are processes of their own and end as a mesh may."""

import contextlib
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from weft.mesh.registry import mesh_folder

_OWNER = """
import sys
from weft.mesh.registry import mesh_folder
with mesh_folder() as folder:
    (folder / "model.sock").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    """Where temporary files go, in this process and in those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@contextlib.contextmanager
def owner():
    """A process that owns a folder; it is killed at the end."""
    command = [sys.executable, "-c", _OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.folder = Path(process.stdout.readline().strip())  # type: ignore[attr-defined]
        try:
            yield process
        finally:
            process.kill()


def test_folder_is_private_and_goes_at_the_end(parent):
    """With everything in it."""
    with mesh_folder() as folder:
        (folder / "mesh.key").write_text("secret")
        assert (parent, 0o700) == (folder.parent, stat.S_IMODE(folder.stat().st_mode))
    assert [] == list(parent.iterdir())


def test_folder_of_a_killed_owner_goes_at_the_next_start(parent):
    """One killed with -9 leaves it; that of an owner that lives, and what is no mesh's, stays."""
    (parent / "weft-notes").mkdir()
    (parent / "weft-file").write_text("mine")
    with owner() as killed:
        pass
    assert killed.folder.is_dir()
    with owner() as alive:
        assert {"weft-notes", "weft-file", alive.folder.name} == {path.name for path in parent.iterdir()}
        with mesh_folder():
            assert (alive.folder / "model.sock").exists()


def test_link_to_a_folder_is_not_followed(parent, tmp_path_factory):
    """What a link of that name points to is kept, though nobody owns it."""
    with owner() as killed:
        pass
    elsewhere = killed.folder.rename(tmp_path_factory.mktemp("elsewhere") / "folder")
    (parent / "weft-link").symlink_to(elsewhere)
    with mesh_folder():
        assert (elsewhere / "model.sock").exists()
