"""Files that clients send with a load."""

import multiprocessing
import os
import signal
import tempfile

import pytest

from weft.base.errors import UnavailableError
from weft.serving.lifecycle.sent_files import SentFiles

LOAD: dict[str, bool | int | str | float | bytes] = {"config": "{}", "file:1/model.py": b"12345678"}


def test_files_that_found_no_place_take_none(tmp_path, monkeypatch):
    """Without a temporary folder a load fails with the reason, and the next one may use all that is allowed."""
    files = SentFiles(max_bytes=8)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    for _ in range(2):
        with pytest.raises(UnavailableError, match="no temporary folder can be made: No such file"):
            files.write("m", LOAD)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert b"12345678" == (files.write("m", LOAD).root / "m/1/model.py").read_bytes()


def _write_and_die(folder):
    tempfile.tempdir = str(folder)
    _load = SentFiles(max_bytes=8).write("m", LOAD)
    os.kill(os.getpid(), signal.SIGKILL)


def test_folders_of_killed_processes_are_removed_at_a_start(tmp_path, monkeypatch):
    """Those of processes that run stay; a service that takes no files removes none."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    kept = SentFiles(max_bytes=8).write("m", LOAD)
    process = multiprocessing.get_context("spawn").Process(target=_write_and_die, args=(tmp_path,))
    process.start()
    process.join(60)
    (left,) = {*tmp_path.iterdir()} - {kept.root}
    SentFiles(max_bytes=0)
    assert left.exists()
    SentFiles(max_bytes=8)
    assert {kept.root} == {*tmp_path.iterdir()}
