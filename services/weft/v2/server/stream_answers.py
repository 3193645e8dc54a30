"""Outgoing responses of one ``ModelStreamInfer``: ordering and back-pressure."""

import asyncio

from opentelemetry.trace import Span

from weft.base.core import CallContext, InferCall
from weft.base.errors import WeftError
from weft.v2.protocol.codec import InferMessage

#: Most responses of one stream that gRPC has not taken yet; beyond it the stream's requests block.
MAX_STREAM_ANSWERS = 16


class StreamCall:
    """One request of a stream.

    Attributes:
        turn: Done when earlier requests have ended, or are of decoupled models.
        is_passed: Done when that holds for this one too; the ``turn`` of the next.
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
        """Let later requests respond before this one ends, and this one before earlier ones."""
        if self.is_in_line:
            self.is_in_line = False
            self.turn.add_done_callback(lambda _: self.is_passed.set_result(None))


class Outgoing:
    """Queue of responses; at most ``MAX_STREAM_ANSWERS`` wait for the client.

    Attributes:
        failure: Error that ends the stream, after everything is sent.
    """

    def __init__(self) -> None:
        self.failure: WeftError | None = None
        self._answers: asyncio.Queue[tuple[StreamCall, InferMessage | WeftError, bool] | None]
        self._answers = asyncio.Queue()
        self._room = asyncio.Semaphore(MAX_STREAM_ANSWERS)

    async def put(self, stream_call: StreamCall, answer: InferMessage | WeftError, *, is_final: bool) -> None:
        """Queue a response in its turn; ``is_final``: the last one to its request."""
        if stream_call.is_in_line:
            await asyncio.shield(stream_call.turn)
        await self._room.acquire()
        self._answers.put_nowait((stream_call, answer, is_final))

    def end(self, failure: WeftError | None) -> None:
        """Mark the end of the stream."""
        self.failure = failure
        self._answers.put_nowait(None)

    async def get(self) -> tuple[StreamCall, InferMessage | WeftError, bool] | None:
        """The next response as it was put; None at the end."""
        item = await self._answers.get()
        self._room.release()
        return item
