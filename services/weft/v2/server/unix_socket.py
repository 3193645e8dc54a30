"""The Unix socket of a service, for callers of the same user, and the shared memory for their large tensors."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from weft.base.core import InferResult
from weft.base.errors import InvalidArgumentError, ResourceExhaustedError, UnavailableError
from weft.base.observing.logs import get_logger
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.tensor_memory import (
    HALF_BYTES,
    LOCAL_BYTES,
    PARAMETER,
    UNKNOWN,
    TensorMemory,
    TensorMemoryError,
    is_same_user,
    is_tensor_memory,
    tensors_path,
)
from weft.v2.protocol.wire import message_of_result
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
    """A socket that only this user can connect to; ``takes_over``: replace the socket of a running process."""

    def __init__(self, path: Path, *, takes_over: bool = False) -> None:
        self._path = path.absolute()
        self._takes_over = takes_over
        self._inode = 0
        self._bound = Path(f"{self._path}.{os.getpid()}")  # renamed when callers may come

    def add_to(self, server: grpc.aio.Server) -> None:
        """Make a server listen there when it starts. Raises UnavailableError: the path cannot be used."""
        self._bind(lambda path: server.add_insecure_port(address_of(path)))
        self.publish()

    def listen(self) -> socket.socket:
        """Create a socket for servers of several processes; ``publish`` makes it visible. Raises like ``add_to``."""
        listening = socket.socket(socket.AF_UNIX)
        try:
            self._bind(lambda path: listening.bind(str(path)))
        except UnavailableError:
            listening.close()
            raise
        listening.listen(_BACKLOG)
        return listening

    def publish(self) -> None:
        """Make the socket visible under its path, atomically, also in a take-over."""
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


_TOKEN_BYTES = 32
#: Callers at once; others send tensors through their sockets.
_MAX_CALLERS = 256

_log = get_logger("weft.server")


class LocalTensorService:
    """Maps the tensor memory of callers of this user; unmaps it when they disconnect or die."""

    def __init__(self, path: Path, *, takes_over: bool = False, max_message_bytes: int = HALF_BYTES) -> None:
        self._unix_socket = UnixSocket(Path(tensors_path(str(path))), takes_over=takes_over)
        self._max_bytes = min(HALF_BYTES, max_message_bytes)
        self._listening: socket.socket | None = None
        self._memories: dict[str, TensorMemory] = {}
        self._connections: dict[socket.socket, str] = {}  # with the token, once it has come

    def start(self) -> None:
        """Listen on the running event loop; if that fails, callers send tensors through the normal socket."""
        try:
            listening = self._unix_socket.listen()
            self._unix_socket.publish()
        except UnavailableError as error:
            _log.warning("large tensors go through the Unix socket: %s", error.message)
            return
        listening.setblocking(False)
        self._listening = listening
        asyncio.get_running_loop().add_reader(listening.fileno(), self._accept)

    def close(self) -> None:
        """Stop listening and unmap all memory; call it when no call is in flight."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None
            self._unix_socket.remove()
        for connection in list(self._connections):
            self._lose(connection)

    def received(self, request: InferMessage) -> tuple[InferMessage, TensorMemory]:
        """Replace a request's reference to shared memory by its tensors; also return the memory for the response."""
        token, _, reference = str(request.parameters.pop(PARAMETER)).partition(" ")
        memory = self._memories.get(token)
        if memory is None:
            raise InvalidArgumentError(UNKNOWN)
        if not reference:
            return request, memory
        try:
            contents = memory.read(reference)
        except TensorMemoryError:
            raise InvalidArgumentError(UNKNOWN) from None
        num_bytes = sum(map(len, contents))
        if num_bytes > self._max_bytes:
            raise ResourceExhaustedError(f"Received message larger than max ({num_bytes} vs. {self._max_bytes})")
        if request.contents:
            raise InvalidArgumentError(f"parameter '{PARAMETER}' and raw_input_contents are given; give one of them")
        request.contents = contents
        return request, memory

    def answered(self, response: InferResult | InferMessage, memory: TensorMemory) -> InferMessage:
        """Move large tensors of a response to the memory if they fit; return the response to send."""
        message = message_of_result(response) if isinstance(response, InferResult) else response
        message.parameters.pop(PARAMETER, None)  # a model's
        contents = message.contents
        if sum(map(len, contents)) >= LOCAL_BYTES and (reference := memory.write_until_read(contents)):
            message.contents = []
            message.parameters[PARAMETER] = reference
        return message

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while self._listening is not None:
                connection, _ = self._listening.accept()
                if len(self._connections) >= _MAX_CALLERS or not is_same_user(connection):
                    connection.close()
                    continue
                connection.setblocking(False)
                self._connections[connection] = ""
                asyncio.get_running_loop().add_reader(connection.fileno(), self._on_data, connection)

    def _on_data(self, connection: socket.socket) -> None:
        """The first data is a token with a descriptor; more, or its end, ends the connection."""
        try:
            data, descriptors, _, _ = socket.recv_fds(connection, _TOKEN_BYTES, 1)
        except BlockingIOError:
            return
        except OSError:
            data, descriptors = b"", []
        try:
            token = data.decode("ascii", "replace")
            is_new = not self._connections[connection] and token not in self._memories
            if len(data) == _TOKEN_BYTES and is_new and len(descriptors) == 1 and is_tensor_memory(descriptors[0]):
                self._memories[token] = TensorMemory(descriptors[0], is_service=True)
                self._connections[connection] = token
                connection.send(b"1")
                return
        except OSError as error:
            _log.warning("memory of a caller is not used: %s", error)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._lose(connection)

    def _lose(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        memory = self._memories.pop(self._connections.pop(connection), None)
        if memory is not None:
            memory.close()
