"""Atomic file replacement, and exclusive locks on folders."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.base.errors import PermissionDeniedError, UnavailableError

LOCK = ".lock"
_TEMPORARY = ".tmp"


def replace_file(path: Path, content: bytes, writer: str = "") -> None:
    """Replace a file atomically: readers, also after a crash, see the old content or the new.

    ``writer`` is the name of this process, if several may write the file at once. Raises OSError if it cannot be
    written; the old content stays.
    """
    temporary = path.with_name(f"{path.name}{writer and '.' + writer}{_TEMPORARY}")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files of killed writers from a folder that nobody else writes to."""
    for path in folder.glob(f"*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[None]:
    """Lock a file or folder, opened with ``flags``. Raises BlockingIOError if another process holds the lock."""
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Create an output folder if necessary, and lock it against other processes.

    Raises:
        UnavailableError: Another process holds it.
        OSError: It cannot be made.
    """
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(path / LOCK, os.O_WRONLY | os.O_CREAT))  # NFS locks what is open for writing
        except BlockingIOError:
            raise UnavailableError(f"another job writes to '{path}'; wait for it, or name another --output") from None
        yield


def check_writable(folders: Iterable[Path], cure: str) -> None:
    """Check that files can be created and replaced in folders, before the work that writes there.

    Raises:
        PermissionDeniedError: In one they cannot.
    """
    for folder in folders:
        if not os.access(folder, os.W_OK):
            raise PermissionDeniedError(f"'{folder}' cannot be written; {cure}")
