"""``ModelStreamInfer``: many requests in one stream, each with any number of responses."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from opentelemetry.trace import Span

from weft.base.core import CallContext, InferCall, InferenceCore, InferResult
from weft.base.errors import UnavailableError, WeftError
from weft.base.observing import telemetry
from weft.base.security import access
from weft.v2.protocol.codec import InferMessage
from weft.v2.protocol.shared_memory import TensorLocation
from weft.v2.protocol.status import text_for_client
from weft.v2.protocol.wire import message_of_result
from weft.v2.server.call_boundary import (
    CallBoundary,
    Context,
    deadline_ns_of,
    headers_of,
    name_in_logs,
    trailing_of,
    withdrawal,
)
from weft.wire.interface import grpc

#: Most responses of one stream that gRPC has not taken yet; beyond it the stream's requests block.
MAX_STREAM_ANSWERS = 16


class StreamCall:
    """One request of a stream.

    Attributes:
        turn: Done when this request may respond: earlier ones have ended, or are of decoupled models.
        is_passed: Done when the next request may respond; its ``turn``.
    """

    __slots__ = ("context", "is_in_line", "is_passed", "request", "span", "turn")

    def __init__(
        self, request: InferMessage | InferCall, context: CallContext, span: Span, turn: "asyncio.Future[None]"
    ) -> None:
        self.request = request
        self.context = context
        self.span = span
        self.turn = turn
        self.is_in_line = True
        self.is_passed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def leave_line(self) -> None:
        """Stop ordering: later requests may respond before this one ends, and this one before earlier ones."""
        if self.is_in_line:
            self.is_in_line = False
            self.turn.add_done_callback(lambda _: self.is_passed.set_result(None))


class Outgoing:
    """Queue of responses, ``MAX_STREAM_ANSWERS`` at most; ``failure`` ends the stream after everything is sent."""

    def __init__(self) -> None:
        self.failure: WeftError | None = None
        self._answers: asyncio.Queue[tuple[StreamCall, InferMessage | WeftError, bool] | None]
        self._answers = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_STREAM_ANSWERS)

    async def put(self, stream_call: StreamCall, answer: InferMessage | WeftError, *, is_final: bool) -> None:
        """Queue a response once the request has its turn; ``is_final``: its last one."""
        if stream_call.is_in_line:
            await asyncio.shield(stream_call.turn)
        await self._room.acquire()
        self._answers.put_nowait((stream_call, answer, is_final))

    def end(self, failure: WeftError | None) -> None:
        """Mark the end of the stream."""
        self.failure = failure
        self._answers.put_nowait(None)

    async def get(self) -> tuple[StreamCall, InferMessage | WeftError, bool] | None:
        """Wait for the next response and return it as it was put; None at the end."""
        item = await self._answers.get()
        self._room.release()
        return item


#: Most requests of one stream in flight; beyond it the stream is not read, which gRPC turns into
#: back-pressure at the client.
MAX_STREAM_INFLIGHT = 256

_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
#: Response parameter of an error in a stream: the name of its gRPC status.
_STATUS = "grpc_status"

#: Parses a request into a call and the locations of its outputs.
ReadCall = Callable[[InferMessage | InferCall, CallContext], tuple[InferCall, Mapping[str, TensorLocation]]]


class StreamServicer:
    """Serves streams."""

    def __init__(self, core: InferenceCore, edge: CallBoundary, read_call: ReadCall, shutting_down: str) -> None:
        self._core = core
        self._edge = edge
        self._read_call = read_call
        self._shutting_down = shutting_down
        self._readers: set[asyncio.Task[None]] = set()

    def drain(self) -> None:
        """End each stream with UNAVAILABLE after the requests it has read."""
        for reader in self._readers:
            reader.cancel()

    async def serve(
        self, request_iterator: AsyncIterator[InferMessage | InferCall], context: Context
    ) -> AsyncGenerator[tuple[str, InferMessage], None]:
        """See ``V2Servicer.ModelStreamInfer``."""
        headers, deadline_ns = headers_of(context), deadline_ns_of(context)
        ends_on_error = headers.get("triton_grpc_error") == "true"
        outgoing = Outgoing()
        free = asyncio.Semaphore(MAX_STREAM_INFLIGHT)
        running: set[asyncio.Task[None]] = set()

        async def read() -> None:
            turn = asyncio.get_running_loop().create_future()
            turn.set_result(None)
            with contextlib.suppress(grpc.RpcError):  # the client broke the stream off
                async for request in request_iterator:
                    await free.acquire()
                    stream_call = StreamCall(
                        request,
                        *self._edge.begin(request.model_name, headers, deadline_ns, method="ModelStreamInfer"),
                        turn,
                    )
                    turn = stream_call.is_passed
                    task = asyncio.create_task(self._answer(stream_call, outgoing))
                    running.add(task)
                    task.add_done_callback(end_of_request)

        def end_of_request(task: asyncio.Task[None]) -> None:
            running.discard(task)
            free.release()
            end_when_answered()

        def end_of_requests(reader: asyncio.Task[None]) -> None:
            self._readers.discard(reader)
            end_when_answered()

        def end_when_answered() -> None:
            if running or not reader.done():
                return
            if reader.cancelled():
                outgoing.end(UnavailableError(self._shutting_down))
            else:
                error = reader.exception()
                outgoing.end(self._edge.as_weft_error(error) if isinstance(error, Exception) else None)

        reader = asyncio.create_task(read())
        self._readers.add(reader)
        reader.add_done_callback(end_of_requests)
        try:
            while (item := await outgoing.get()) is not None:
                stream_call, answer, is_final = item
                if isinstance(answer, WeftError):
                    if ends_on_error:
                        self._edge.fail(context, answer, call_context=stream_call.context)
                        return
                    yield _stream_error(answer, stream_call, is_final=is_final)
                else:
                    yield "", answer
            if outgoing.failure is not None:
                self._edge.fail(context, outgoing.failure)
        finally:
            reader.cancel()
            for task in running:
                task.cancel()

    async def _answer(self, stream_call: StreamCall, outgoing: Outgoing) -> None:
        request = stream_call.request
        name_in_logs(request.request_id, stream_call.context)
        wants_null = request.parameters.get(_EMPTY_FINAL) is True
        failure: WeftError | None = None
        try:
            with access.admission(request.model_name):
                call, places = self._read_call(request, stream_call.context)
                results = self._core.stream_infer(call, stream_call.context)
                async with contextlib.aclosing(results):
                    async for result in results:
                        if result.is_unordered or result.is_null or not result.is_final:
                            stream_call.leave_line()
                        if wants_null or not result.is_null:
                            answer = result.error or _stream_response(result, places)
                            await outgoing.put(stream_call, answer, is_final=result.is_final)
        except asyncio.CancelledError:
            failure = withdrawal(stream_call.context)
            raise
        except Exception as error:
            failure = self._edge.as_weft_error(error, request.model_name, stream_call.context)
            await outgoing.put(stream_call, failure, is_final=True)
        finally:
            stream_call.leave_line()
            telemetry.end_span(stream_call.span, failure)
            del failure  # it holds this frame, and with it the tensors


def _stream_response(result: InferResult, places: Mapping[str, TensorLocation]) -> InferMessage:
    response = message_of_result(result, places)
    response.parameters[_FINAL] = result.is_final
    return response


def _stream_error(error: WeftError, stream_call: StreamCall, *, is_final: bool) -> tuple[str, InferMessage]:
    """The error as a stream message; status and metadata become parameters, because some clients show only the text."""
    parameters = {_FINAL: is_final, _STATUS: error.code, **dict(trailing_of(error, stream_call.context))}
    return text_for_client(error), InferMessage("", "", stream_call.request.request_id, parameters)
