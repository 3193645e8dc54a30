"""``ReloadingFiles``: certificates and keys that may be replaced while a service runs."""

import contextlib
import functools
import os
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from weft.base.errors import InvalidArgumentError
from weft.base.observing.logs import get_logger

#: Shortest time between two checks of the files, in seconds; a check is a ``stat`` of each.
CHECK_PERIOD_S = 1.0

_MAX_BYTES = 16 << 20

_log = get_logger("weft.security")

Content = TypeVar("Content")
_Stamp = tuple[tuple[int, int, int] | None, ...]


class ReloadingFiles(Generic[Content]):
    """Parsed content of some files, reloaded when one changes; an invalid new version leaves the old one in force.

    There is no thread and no task: the files are checked when the content is requested. Not thread-safe.

    Args:
        read: Reads and validates all of them. Raises InvalidArgumentError.

    Raises:
        InvalidArgumentError: A file is invalid now.
    """

    def __init__(
        self, paths: Sequence[Path], read: Callable[[], Content], *, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._paths = paths
        self._read = read
        self._clock_s = clock_s
        self._stamp = self._stamp_now()
        self._next_check_s = clock_s() + CHECK_PERIOD_S
        self._content = read()

    def get(self) -> Content:
        """The content, at most ``CHECK_PERIOD_S`` old as long as the files are valid."""
        now_s = self._clock_s()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + CHECK_PERIOD_S
            self._check()
        return self._content

    def _check(self) -> None:
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp  # an invalid file is reported once per change
        names = ", ".join(map(str, self._paths))
        try:
            self._content = self._read()
        except InvalidArgumentError as error:
            _log.error("the new files cannot be used; the old ones stay in force: %s", error.message)
        else:
            _log.info("the new files are in force: %s", names)

    def _stamp_now(self) -> _Stamp:
        return tuple(map(_stamp_of, self._paths))


def read_file(path: Path, what: str) -> bytes:
    """Read a regular file. Raises InvalidArgumentError, which calls it ``what``."""
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # a pipe can be read once only, and could block
                raise InvalidArgumentError(f"{what} {path} is no file; give one that can be read again")
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidArgumentError(f"{what} {path} cannot be read: {error.strerror}") from None
    if len(data) > _MAX_BYTES:
        raise InvalidArgumentError(f"{what} {path} has more than {_MAX_BYTES} bytes")
    return data


def _open_nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)


@functools.cache
def warn_if_shared(path: Path) -> None:
    """Warn once per file if a secret is readable by every user of this machine."""
    with contextlib.suppress(OSError):
        if path.stat().st_mode & stat.S_IROTH:
            _log.warning("every user of this machine may read %s, which is secret; chmod 600 it", path)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)  # follows links: Kubernetes replaces the folder behind one
    except OSError:
        return None
    return found.st_ctime_ns, found.st_size, found.st_ino  # unlike mtime, ctime cannot be reset by tools
