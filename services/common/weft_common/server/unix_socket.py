"""A Unix socket that a service listens on beside its ports, for callers on the same machine and of the same user."""

import os
import socket
import stat
from pathlib import Path
from urllib.parse import quote

import grpc

from weft_common.errors import UnavailableError

#: Linux takes 107 bytes; the socket is bound under a longer name first.
MAX_PATH_BYTES = 107 - len(".4194304")


def address_of(path: Path) -> str:
    """What gRPC dials to reach the socket."""
    return f"unix:{quote(str(path.absolute()))}"


def path_fault(path: Path) -> str:
    """Why no service could listen on a path; "" if one could."""
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
        path: Where it is. What a process that died has left there is replaced.
        takes_over: So is what another one listens on, which goes on with the connections that it has.
    """

    def __init__(self, path: Path, *, takes_over: bool = False) -> None:
        self._path = path.absolute()
        self._takes_over = takes_over
        self._inode = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """A server that starts answers there.

        Raises:
            UnavailableError: The path is too long, is no socket, is in use, or cannot be written.
        """
        if fault := path_fault(self._path) or self._occupied():
            raise UnavailableError(f"cannot listen on a Unix socket: {fault}")
        # Moved into place when it is bound, so that callers find a socket at any time, during a take-over too.
        bound = Path(f"{self._path}.{os.getpid()}")
        old_mask = os.umask(0o177)
        try:
            server.add_insecure_port(address_of(bound))
            self._inode = bound.stat().st_ino
            bound.rename(self._path)
        except (RuntimeError, OSError) as error:
            reason = str(error).partition(";")[0]
            raise UnavailableError(f"cannot listen on a Unix socket at '{self._path}': {reason}") from error
        finally:
            os.umask(old_mask)

    def remove(self) -> None:
        """The socket is gone, unless it is another process's by now."""
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
