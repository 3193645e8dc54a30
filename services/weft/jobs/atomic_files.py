"""Files that are never half written, and folders that one process holds."""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from weft.base.errors import PermissionDeniedError, UnavailableError

LOCK = ".lock"
_TEMPORARY = ".tmp"


def replace_file(path: Path, content: bytes, writer: str = "") -> None:
    """Write a file so that whoever reads it, at any moment and after a crash, finds the old content or the new.

    ``writer`` is the name of this process, where several may write the file at the same time. Raises OSError where it
    cannot be written; the old content stays.
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
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder, which nobody else writes to."""
    for path in folder.glob(f"*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, flags: int = os.O_RDONLY) -> Iterator[None]:
    """Lock a file or folder, opened with ``flags``. Raises BlockingIOError where another process holds the lock."""
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold an output folder, which is made if it is missing; nobody else can meanwhile.

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
    """Check that files can be made and replaced in folders, before work whose result goes there.

    Raises:
        PermissionDeniedError: In one they cannot.
    """
    for folder in folders:
        if not os.access(folder, os.W_OK):
            raise PermissionDeniedError(f"'{folder}' cannot be written; {cure}")
