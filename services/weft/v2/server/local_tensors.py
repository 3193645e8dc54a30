"""A service's end of the memory for large tensors that callers on its Unix socket share with it."""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

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
from weft.v2.server.unix_socket import UnixSocket

_TOKEN_BYTES = 32
#: Callers at once; others send tensors through their sockets.
_MAX_CALLERS = 256

_log = get_logger("weft.server")


class LocalTensorService:
    """Maps the memory of callers of this user, and unmaps it when they close their connections or die.

    Args:
        path: The service's Unix socket.
        takes_over: As of ``UnixSocket``.
        max_message_bytes: Largest request, also in such memory.
    """

    def __init__(self, path: Path, *, takes_over: bool = False, max_message_bytes: int = HALF_BYTES) -> None:
        self._unix_socket = UnixSocket(Path(tensors_path(str(path))), takes_over=takes_over)
        self._max_bytes = min(HALF_BYTES, max_message_bytes)
        self._listening: socket.socket | None = None
        self._memories: dict[str, TensorMemory] = {}
        self._connections: dict[socket.socket, str] = {}  # with the token, once it has come

    def start(self) -> None:
        """Listen, on the running event loop; without the socket callers send tensors through their own."""
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
        """Listen no more, and unmap all memory; to be called when no call is in flight."""
        if self._listening is not None:
            asyncio.get_running_loop().remove_reader(self._listening.fileno())
            self._listening.close()
            self._listening = None
            self._unix_socket.remove()
        for connection in list(self._connections):
            self._lose(connection)

    def received(self, request: InferMessage) -> tuple[InferMessage, TensorMemory]:
        """A request that has the parameter, without it and with its tensors, and the memory for the response.

        Raises:
            InvalidArgumentError: It does not refer to memory that this service maps; nothing was done.
            ResourceExhaustedError: Its tensors are larger than a message may be.
        """
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
        """A response with its tensors in the memory, if they are large and have room, and else as it is."""
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
