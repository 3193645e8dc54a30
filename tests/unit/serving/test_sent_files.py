"""Bytes of sent files are counted as long as they are kept."""

import tempfile
from pathlib import Path

import pytest

from weft.base.errors import UnavailableError
from weft.serving.lifecycle.sent_files import SentFiles


def test_files_that_could_not_be_written_take_no_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a folder for temporary files a load is refused, and the next one has all the bytes that are allowed."""
    files = SentFiles(4)
    parameters: dict[str, str | bytes] = {"config": "{}", "file:1/model.py": b"four"}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    with pytest.raises(UnavailableError, match="no folder for its files can be made: No such file"):
        files.write("m", parameters)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = files.write("m", parameters)
    assert folder is not None
    assert (folder.root / "m/1/model.py").read_bytes() == b"four"
    folder.remove()
    assert list(tmp_path.iterdir()) == []
