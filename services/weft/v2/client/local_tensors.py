"""A caller's end of the memory for large tensors that it shares with a service on a Unix socket."""

import asyncio
import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any, cast
from urllib.parse import unquote

from weft.base.core import InferCall
from weft.v2.protocol.large_messages import LargeResponse, request_with
from weft.v2.protocol.local_socket import is_same_user, tensors_path
from weft.v2.protocol.rpc import response_of
from weft.v2.protocol.tensor_memory import (
    LOCAL_BYTES,
    PARAMETER,
    UNKNOWN,
    TensorMemory,
    TensorMemoryError,
    make_tensor_memory,
)
from weft.v2.protocol.wire import fill_request
from weft.wire.interface import grpc
from weft_protos import grpc_service_pb2 as pb

#: Time between two attempts, in seconds.
_RETRY_S = 5.0
_MAX_MODELS = 1024


class _SharedMemory:
    """A connection over which memory was offered, and the memory.

    Args:
        path: Of the service's socket for it.
        on_end: Called when the service has closed the connection.

    Attributes:
        memory: The caller's end.
        token: Names it in requests.
        is_accepted: The service maps it.

    Raises:
        OSError: There is no such socket, it is another user's, or the system has no such memory.
    """

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

    async def infer(self, request: Any, contents: list[bytes], invoke: Callable[[Any], Any]) -> pb.ModelInferResponse:
        """As ``LocalTensors.infer``, with a request without its tensors."""
        self._num_calls += 1
        written = self.memory.write(contents) if sum(map(len, contents)) >= LOCAL_BYTES else None
        try:
            offer = request.parameters[PARAMETER]
            offer.string_param = self.token if written is None else f"{self.token} {written[1]}"
            response = await response_of(invoke(request_with(request, contents) if written is None else request))
            return _unpacked(response, self.memory)
        finally:
            if written is not None:
                self.memory.free(written[0])
            self._num_calls -= 1
            self._close_unless_used()

    def retire(self) -> None:
        """Begin no more calls; it ends with those in flight, whose responses may lie in the memory."""
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
    """Calls of one service; memory is shared from the first large tensor on, if the service offers it.

    Args:
        address: ``unix:path``, as gRPC has it.
    """

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
        """Whether a call has large tensors, or one of its model had a large answer."""
        num_bytes = 0
        for tensor in call.inputs.values():
            num_bytes += len(tensor.data)
        return num_bytes >= LOCAL_BYTES or call.model_name in self._large_answers

    async def infer(self, call: InferCall, invoke: Callable[[Any], Any]) -> Any:
        """The response to a call, as its deserializer gives it. Cancelling the awaiting task cancels the call.

        Args:
            call: The call.
            invoke: Starts the RPC with a request.

        Raises:
            AioRpcError: It has failed.
        """
        shared = self._open() if self.is_for(call) else None
        if shared is not None:
            try:
                return await shared.infer(*_split(call), invoke)
            except grpc.aio.AioRpcError as error:
                if error.details() != UNKNOWN:
                    raise
            if self._shared is shared:
                self._drop()  # the service is another process by now
        response: Any = await response_of(invoke(call))
        if type(response) is LargeResponse:
            self.note(call.model_name)
        return response

    def note(self, model: str) -> None:
        """A model has had a large answer: the next ones are for this memory."""
        if len(self._large_answers) >= _MAX_MODELS:
            self._large_answers.clear()
        self._large_answers.add(model)

    def close(self) -> None:
        """Share no more."""
        self._next_attempt_s = float("inf")
        self._drop()

    def _open(self) -> _SharedMemory | None:
        """The memory, once the service has accepted it; else None, and it is offered from time to time."""
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


def _split(call: InferCall) -> tuple[pb.ModelInferRequest, list[bytes]]:
    """The request of a call without its tensors, and these."""
    request = pb.ModelInferRequest()
    contents: list[bytes] = []
    fill_request(request, call, contents)
    return request, contents


def _unpacked(response: pb.ModelInferResponse, memory: TensorMemory) -> pb.ModelInferResponse:
    """The response with its tensors."""
    if PARAMETER not in response.parameters:
        return response
    reference = response.parameters[PARAMETER].string_param
    del response.parameters[PARAMETER]
    try:
        return cast(pb.ModelInferResponse, LargeResponse(response, memory.read(reference)))
    except TensorMemoryError:
        text = "the response was not read in time, or the service has gone"
        raise grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), text, None
        ) from None
