"""Files that clients send with a load."""

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
