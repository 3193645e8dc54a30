"""A temporary folder for one run, which also cleans up behind runs that were killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "weft-optimize-"
#: A younger folder without a lock may be one whose run has yet to lock it, in seconds.
_MIN_AGE_S = 60.0


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A folder that lasts as long as the block; its lock tells others that the run lives. Raises OSError."""
    _remove_abandoned(Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as name, _locked(Path(name)):
        yield Path(name)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # held, another user's, or gone meanwhile
            if folder.is_dir() and time.time() - folder.stat().st_mtime > _MIN_AGE_S:
                with _locked(folder):
                    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
