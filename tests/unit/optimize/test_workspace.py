"""Temporary folders of runs."""

import os
import tempfile
from pathlib import Path

import pytest

from weft.optimize.optimize import workspace


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def abandoned(temporary: Path, name: str, *, age_s: float) -> Path:
    """A folder that no run holds."""
    folder = temporary / name
    (folder / "inner").mkdir(parents=True)
    then_s = folder.stat().st_mtime - age_s
    os.utime(folder, (then_s, then_s))
    return folder


def test_a_run_ends_with_its_folder(temporary: Path) -> None:
    """However it ends."""

    def run() -> None:
        with workspace() as folder:
            (folder / "file").write_text("a")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert [] == list(temporary.iterdir())


def test_what_a_killed_run_left_is_removed_and_nothing_else(temporary: Path) -> None:
    """A folder that is held, that has only just been made, or that is another program's, stays."""
    old = abandoned(temporary, "weft-optimize-old", age_s=3600)
    new = abandoned(temporary, "weft-optimize-new", age_s=0)
    other = abandoned(temporary, "other", age_s=3600)
    with workspace() as held:
        os.utime(held, (0, 0))
        with workspace():
            pass
        assert held.is_dir()
        assert not old.exists()
    assert {new, other} == set(temporary.iterdir())
