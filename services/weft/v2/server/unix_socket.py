"""A Unix socket that a service listens on besides its ports, for callers of the same user on the same machine."""

import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from weft.base.errors import UnavailableError
from weft.wire.interface import grpc

#: Linux's limit is 107 bytes, and the socket is first bound under a longer name.
MAX_PATH_BYTES = 107 - len(".4194304")

_BACKLOG = 4096


def address_of(path: Path) -> str:
    """Target address of the socket for gRPC."""
    return f"unix:{quote(str(path.absolute()))}"


def path_fault(path: Path) -> str:
    """Error message for a path that cannot be used; "" if valid."""
    size_bytes = len(os.fsencode(path.absolute()))
    if size_bytes > MAX_PATH_BYTES:
        return f"the path '{path.absolute()}' has {size_bytes} bytes; give one of at most {MAX_PATH_BYTES}"
    if "," in str(path.absolute()):
        return f"the path '{path.absolute()}' has a comma, at which gRPC takes addresses apart; give one without"
    if not path.parent.is_dir():
        return f"there is no folder '{path.parent}'; make it, private to this user"
    return ""


class UnixSocket:
    """A socket that only this user can connect to.

    Args:
        path: Its path. A leftover socket of a dead process is replaced.
        takes_over: Also replace the socket of a running process, which keeps its existing connections.
    """

    def __init__(self, path: Path, *, takes_over: bool = False) -> None:
        self._path = path.absolute()
        self._takes_over = takes_over
        self._inode = 0
        self._bound = Path(f"{self._path}.{os.getpid()}")  # renamed when callers may come

    def add_to(self, server: grpc.aio.Server) -> None:
        """Make a server listen there when it starts.

        Raises:
            UnavailableError: The path is too long, is not a socket, is in use, or is not writable.
        """
        self._bind(lambda path: server.add_insecure_port(address_of(path)))
        self.publish()

    def listen(self) -> socket.socket:
        """A socket that listens there from ``publish`` on, for servers of several processes. Raises as ``add_to``."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            self._bind(lambda path: listening.bind(str(path)))
        except UnavailableError:
            listening.close()
            raise
        listening.listen(_BACKLOG)
        return listening

    def publish(self) -> None:
        """Callers find the socket from now on; there is one at any time, also during a take-over.

        Raises:
            UnavailableError: The folder is gone.
        """
        try:
            self._bound.rename(self._path)
        except OSError as error:
            raise UnavailableError(f"cannot listen on a Unix socket at '{self._path}': {error.strerror}") from error

    def _bind(self, bind: Callable[[Path], object]) -> None:
        if fault := path_fault(self._path) or self._occupied():
            raise UnavailableError(f"cannot listen on a Unix socket: {fault}")
        old_mask = os.umask(0o177)
        try:
            bind(self._bound)
            self._inode = self._bound.stat().st_ino
        except (RuntimeError, OSError) as error:
            reason = str(error).partition(";")[0]
            raise UnavailableError(f"cannot listen on a Unix socket at '{self._path}': {reason}") from error
        finally:
            os.umask(old_mask)

    def remove(self) -> None:
        """Remove the socket, unless another process has replaced it."""
        with contextlib.suppress(OSError):
            self._bound.unlink()  # it was never published
        try:
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        except OSError:
            pass

    def _occupied(self) -> str:
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return ""
        if not stat.S_ISSOCK(mode):
            return f"'{self._path}' is there and is no socket; choose another path"
        if self._takes_over:
            return ""
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self._path))
            except (ConnectionRefusedError, FileNotFoundError):
                return ""
            except OSError as error:
                return f"'{self._path}': {error.strerror}"
        return f"another process listens on '{self._path}'; stop it, or choose another path"
