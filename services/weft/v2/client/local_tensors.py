"""The caller's side of shared memory for large tensors in calls over a Unix socket."""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from weft.base.core import InferCall, InferResult
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.encoding import LARGE_BYTES
from weft.v2.protocol.status import response_of
from weft.v2.protocol.tensor_memory import (
    LOCAL_BYTES,
    PARAMETER,
    UNKNOWN,
    TensorMemory,
    TensorMemoryError,
    is_same_user,
    make_tensor_memory,
    tensors_path,
)
from weft.v2.protocol.wire import message_of_call
from weft.wire.interface import grpc

#: Time between two attempts, in seconds.
_RETRY_S = 5.0
_MAX_MODELS = 1024


class _SharedMemory:
    """A connection that was offered shared memory, and the memory. OSError: no memory, or another user owns it."""

    def __init__(self, path: str, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._num_calls = 0
        self._is_retired = False
        self.is_accepted = False
        self.token = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            connection.connect(path)
            if not is_same_user(connection):
                raise PermissionError(f"'{path}' is another user's")
            descriptor = make_tensor_memory()
            stack.callback(os.close, descriptor)
            self.memory = TensorMemory(descriptor, is_service=False)
            stack.callback(self.memory.close)
            socket.send_fds(connection, [self.token.encode()], [descriptor])
            os.close(descriptor)
            stack.pop_all()
        self._socket = connection
        asyncio.get_running_loop().add_reader(connection.fileno(), self._on_data)

    async def infer(self, request: InferMessage, invoke: Callable[[Any], Any]) -> Any:
        self._num_calls += 1
        contents = request.contents
        written = self.memory.write(contents) if sum(map(len, contents)) >= LOCAL_BYTES else None
        try:
            request.parameters[PARAMETER] = self.token
            if written is not None:
                request.parameters[PARAMETER] = f"{self.token} {written[1]}"
                request.contents = []
            return _unpacked(await response_of(invoke(request)), self.memory)
        finally:
            if written is not None:
                self.memory.free(written[0])
            self._num_calls -= 1
            self._close_unless_used()

    def retire(self) -> None:
        if not self._is_retired:
            self._is_retired = True
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._close_unless_used()

    def _close_unless_used(self) -> None:
        if self._is_retired and not self._num_calls:
            self._socket.close()
            self.memory.close()

    def _on_data(self) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = self._socket.recv(1)
        if data:
            self.is_accepted = True
        else:
            self._on_end()


class LocalTensors:
    """Sends large tensors of calls to one service through shared memory, if the service offers it."""

    def __init__(self, address: str) -> None:
        self._path = tensors_path(unquote(address.removeprefix("unix:")))
        self._shared: _SharedMemory | None = None
        self._next_attempt_s = float("-inf")
        self._large_answers: set[str] = set()  # models

    @property
    def is_open(self) -> bool:
        """Whether the service maps the memory."""
        return self._shared is not None and self._shared.is_accepted

    def is_for(self, call: InferCall) -> bool:
        """Whether a call has large tensors, or its model has returned some before."""
        num_bytes = 0
        for _, _, data in call.inputs.values():
            num_bytes += len(data)
        return num_bytes >= LOCAL_BYTES or call.model_name in self._large_answers

    async def infer(self, call: InferCall, invoke: Callable[[Any], Any]) -> Any:
        """Run a call started by ``invoke`` and return its response. Cancelling the awaiting task cancels the call."""
        shared = self._open() if self.is_for(call) else None
        if shared is not None:
            try:
                return await shared.infer(message_of_call(call), invoke)
            except grpc.aio.AioRpcError as error:
                if error.details() != UNKNOWN:
                    raise
            if self._shared is shared:
                self._drop()  # the service is another process by now
        response = await response_of(invoke(call))
        self.note(call.model_name, response)
        return response

    def note(self, model: str, response: InferResult | InferMessage) -> None:
        """Remember a model whose response is large, so that its next calls use this memory."""
        num_bytes = 0
        if isinstance(response, InferResult):
            for _, _, data in response.outputs.values():
                num_bytes += len(data)
        else:
            num_bytes = sum(map(len, response.contents))
        if num_bytes >= LARGE_BYTES:
            if len(self._large_answers) >= _MAX_MODELS:
                self._large_answers.clear()
            self._large_answers.add(model)

    def close(self) -> None:
        """Stop sharing memory."""
        self._next_attempt_s = float("inf")
        self._drop()

    def _open(self) -> _SharedMemory | None:
        if self._shared is not None:
            return self._shared if self._shared.is_accepted else None
        now_s = time.monotonic()
        if now_s >= self._next_attempt_s:
            self._next_attempt_s = now_s + _RETRY_S
            with contextlib.suppress(OSError):
                self._shared = _SharedMemory(self._path, self._drop)
        return None

    def _drop(self) -> None:
        if self._shared is not None:
            self._shared.retire()
            self._shared = None


def _unpacked(response: InferResult | InferMessage, memory: TensorMemory) -> InferResult | InferMessage:
    if isinstance(response, InferResult) or PARAMETER not in response.parameters:
        return response
    try:
        response.contents = memory.read(str(response.parameters.pop(PARAMETER)))
    except TensorMemoryError:
        text = "the response was not read in time, or the service has gone"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), text, None
        ) from None
    return response
