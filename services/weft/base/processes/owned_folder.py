"""Temporary folders that belong to one process: a lock on each ends with the process, however it ends.

The lock also keeps systemd-tmpfiles from cleaning the folder.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

#: A file in each folder that was locked once: a folder that has it and no lock was left by a killed process.
_OWNED = ".owned"


@contextlib.contextmanager
def owned_folder(prefix: str) -> Iterator[Path]:
    """A folder that only this user may enter; removed after the block. Raises OSError."""
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name:
        held = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(held, fcntl.LOCK_EX)  # a reader may have it for a moment
            Path(name, _OWNED).touch()
            yield Path(name)
        finally:
            os.close(held)


def remove_left(prefix: str) -> None:
    """Remove the folders of this user that killed processes have left."""
    for mark in Path(tempfile.gettempdir()).glob(f"{prefix}*/{_OWNED}"):
        with contextlib.suppress(OSError):  # in use
            _remove_if_left(mark.parent)


def _remove_if_left(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid == os.getuid():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
